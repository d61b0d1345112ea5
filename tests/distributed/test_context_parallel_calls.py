"""Context parallelism as a call: what every rank refuses, what is forced, what surrounds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from csa_dispatch import BackendRefused, attention, record_receipts, register_backend, settings
from csa_dispatch.capabilities import FALSE, Capabilities
from csa_dispatch.distributed import context_parallel_attention
from tests.core.probes import WindowBackend
from tests.distributed.test_context_parallel import part
from tests.distributed.workers import run_processes

compiled: Any = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")


def rows(heads: int = 1, tokens: int = 8) -> Tensor:
    """A whole sequence's, the same on every rank."""
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(1, heads, tokens, 16, generator=generator)


def compile_the_first_call() -> None:
    assert settings._current is None, "something has called before"
    query, local_kv = rows(2), rows()
    ids = torch.arange(8)[None] // 3
    mine = part(query, 2).requires_grad_(), part(local_kv, 2).requires_grad_()
    found = compiled(*mine, doc_ids=part(ids, 1), sliding_window_size=3)
    dist.barrier()  # no rank's forward waits for another's backward
    found.sum().backward()
    whole = attention(query, local_kv, doc_ids=ids, sliding_window_size=3)
    torch.testing.assert_close(found, part(whole, 2))


def refuse_what_one_rank_would() -> None:
    """With check_values every rank raises at once; none waits for one that did."""
    odd = dist.get_rank() == 1
    zeros = torch.zeros(1, 1, 4, 16)
    longer = torch.zeros(1, 1, 5, 16) if odd else zeros
    double = zeros.double() if odd else zeros
    offsets = torch.tensor([0, 4 if odd else 3, 8], dtype=torch.int32)
    wanted = zeros.clone().requires_grad_(odd)
    calls: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
        ("query's shape is", (longer, longer), {}),
        ("query's dtype is", (double, double), {}),
        ("local_kv's requires_grad is True on rank 1", (zeros, wanted), {}),
        ("cu_seqlens is", (zeros, zeros), {"cu_seqlens": offsets}),
        ("backend is", (zeros, zeros), {"backend": "nope" if odd else None}),
        ("sliding_window_size is 2 on rank 1", (zeros, zeros), {"sliding_window_size": 3 - odd}),
        ("local_kv is torch.float64", (zeros, double), {}),  # on rank 0: rank 1 refuses
    ]
    for message, tensors, arguments in calls:
        with pytest.raises(ValueError, match=message):
            context_parallel_attention(
                *tensors, **{"sliding_window_size": 3, **arguments}, check_values=True
            )
    group = dist.new_group([0])
    if odd:
        with pytest.raises(ValueError, match="group is one that this process is not in"):
            context_parallel_attention(zeros, zeros, sliding_window_size=3, group=group)


def refuse_values() -> None:
    """An index or id of one rank's, or offsets of the whole sequence, in the caller's numbers."""
    odd = dist.get_rank() == 1
    query, pool = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 2, 16)
    picks = torch.zeros(1, 8, 2, dtype=torch.int64)
    picks[0, 3, 1] = 4 if odd else 3  # of a pool of 4
    of_document = picks.clone()
    of_document[0, 3, 1] = 2 if odd else 1
    ids = torch.full((1, 8), 5 - odd, dtype=torch.int32)

    def offsets(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    packed = {"cu_seqlens": offsets(0, 9, 16), "cu_seqlens_k": offsets(0, 2, 4)}
    gathered: dict[str, Any] = {"sparse_kv": pool, "kv_indices": picks}
    calls: list[tuple[str, dict[str, Any]]] = [
        (r"kv_indices is 4 at \[0, 3, 1\]; it must be under 4", gathered),
        (
            r"kv_indices is 2 at \[0, 3, 1\]; it must be under 2",
            {**gathered, "kv_indices": of_document, **packed},
        ),
        ("cu_seqlens_k is 5 at its end", {**gathered, **packed, "cu_seqlens_k": offsets(0, 2, 5)}),
        ("cu_seqlens is 21 at its end.*the 16 rows", {"cu_seqlens": offsets(0, 21)}),
        ("cu_seqlens is 9, 4 at 1", {"cu_seqlens": offsets(0, 9, 4, 16)}),
        ("doc_ids is 5 at the end of rank 0 and 4 at the beginning of rank 1", {"doc_ids": ids}),
    ]
    for call, refused in ((context_parallel_attention, calls), (compiled, calls[::3])):
        for message, arguments in refused:
            with pytest.raises(ValueError, match=message):
                call(query, query, **arguments, sliding_window_size=3, check_values=True)
    picks[0, 3, 1] = 3
    legal = {**gathered, "cu_seqlens": offsets(0, 8, 16), "cu_seqlens_k": offsets(0, 0, 4)}
    picks[:] = -1 if not odd else picks
    expected = context_parallel_attention(query, query, **legal, sliding_window_size=3)
    for call in (context_parallel_attention, compiled):
        found = call(query, query, **legal, sliding_window_size=3, check_values=True)
        torch.testing.assert_close(found, expected)


def refuse_what_cannot_be_shared() -> None:
    zeros, pool = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 4, 16)
    ids: dict[str, Any] = {"compress_ratio": 2, "doc_ids": torch.zeros(1, 8).int()}
    with pytest.raises(ValueError, match=r"sliding_window_size is 10; .* at most 9.* fewer ranks"):
        context_parallel_attention(zeros, zeros, sliding_window_size=10)
    with pytest.raises(ValueError, match=r"doc_ids is given with compress_ratio; .* cu_seqlens"):
        context_parallel_attention(zeros, zeros, pool, sliding_window_size=3, **ids)


def share_with_nobody() -> None:
    """One rank needs no halo, and takes any window."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    query, local_kv = rows(2), rows()
    alone = groups[dist.get_rank()]
    found = context_parallel_attention(query, local_kv, sliding_window_size=128, group=alone)
    torch.testing.assert_close(found, attention(query, local_kv, sliding_window_size=128))


def run_what_is_forced() -> None:
    register_backend(WindowBackend("probe"))
    query, local_kv = (part(item, 2).requires_grad_() for item in (rows(2), rows()))
    with record_receipts() as receipts:
        context_parallel_attention(
            query, local_kv, sliding_window_size=3, backend="probe"
        ).sum().backward()
    calls = 1 + dist.get_rank()  # the second rank has a seam
    ran = [(receipt.direction, receipt.backend) for receipt in receipts]
    assert sorted(ran) == [("backward", "probe")] * calls + [("forward", "probe")] * calls


def refuse_a_backward_before_sending() -> None:
    """Messages that nobody takes would answer the group's next."""
    register_backend(WindowBackend("racy", Capabilities(deterministic=FALSE)))
    query, local_kv = (part(item, 2).requires_grad_() for item in (rows(2), rows()))
    output = context_parallel_attention(query, local_kv, sliding_window_size=3, backend="racy")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(BackendRefused, match="switched on after the forward"):
            output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    assert ranks.item() == dist.get_world_size()


def cast_under_autocast() -> None:
    query, local_kv = rows(2), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = context_parallel_attention(
            part(query, 2), part(local_kv, 2), sliding_window_size=3
        )
        whole = attention(query, local_kv, sliding_window_size=3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, part(whole, 2))


def return_lse_in_every_layout() -> None:
    query, local_kv = part(rows(2), 2), part(rows(), 2)
    _, expected = context_parallel_attention(
        query, local_kv, sliding_window_size=3, return_lse=True
    )
    _, found = context_parallel_attention(
        query[0].transpose(0, 1),
        local_kv[0].transpose(0, 1),
        sliding_window_size=3,
        layout="THD",
        return_lse=True,
    )
    torch.testing.assert_close(found, expected[0])


def refuse_transforms() -> None:
    query, local_kv = part(rows(2), 2), part(rows(), 2)

    def call(query: Tensor) -> Tensor:
        return context_parallel_attention(query, local_kv, sliding_window_size=3).sum()

    for name, transformed in (
        ("vmap", torch.vmap(call)),
        ("functionalize", torch.func.functionalize(call)),
        ("grad", torch.func.grad(call)),
        ("jvp", lambda query: torch.func.jvp(call, (query,), (query,))),
    ):
        message = rf"context_parallel_attention\(\) is inside torch.*{name}"
        with pytest.raises(NotImplementedError, match=message):
            transformed(query[None] if name == "vmap" else query)


def two_processes() -> None:
    compile_the_first_call()
    refuse_what_one_rank_would()
    refuse_values()
    refuse_what_cannot_be_shared()
    share_with_nobody()
    run_what_is_forced()
    refuse_a_backward_before_sending()
    cast_under_autocast()
    return_lse_in_every_layout()
    refuse_transforms()


def test_a_call_of_two_processes() -> None:
    """Its refusals, the first call compiled, forced backends, autocast, layouts, transforms."""
    run_processes(2, two_processes)
