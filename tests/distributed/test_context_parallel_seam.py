"""Context parallelism where shards meet: windows, documents, layouts, and what is copied."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from csa_backend_eager import backend as eager
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from csa_dispatch import Call, Gradients, attention, register_backend
from csa_dispatch.call import Kind
from csa_dispatch.call_spec import GRADIENT_INPUTS
from csa_dispatch.distributed import context_parallel_attention
from csa_dispatch.testing import Case, attention_run
from csa_dispatch.testing.budgets import gradient_tensors
from csa_dispatch.testing.cases import Inputs, build
from csa_dispatch.testing.documents import split_pool
from tests.distributed.test_context_parallel import SHAPES, part, rank_inputs, run_shared
from tests.distributed.workers import run_processes

# Of 24 tokens, shared by two (12 each) or four (6 each).
DOCUMENTS = {
    "around seams": [0, 4, 11, 13, 24],
    "at seams": [0, 6, 12, 12, 18, 24],
    "one": [0, 24],
    "spare rows": [0, 10, 17],
}
LARGEST = 7
"""One more than the tokens of the smaller shard: the whole neighbour is its halo."""
CASES = [(documents, window) for documents in DOCUMENTS for window in (2, LARGEST)]
CASES += [("around seams", window) for window in (0, 1, 6)]


class Recomputing(type(eager)):
    """Eager, its backward working the probabilities out anew: dropped rows have a real lse."""

    name = "recomputing"
    backward_uses_lse = False

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        del output, lse
        return super().backward(call, *self.forward(call), grad_output, needs)


def seam_inputs(kind: Kind, documents: str, window: int) -> Inputs:
    case = Case(
        kind=kind,
        dtype="float64",
        sink="same",
        documents="cu_seqlens",
        content="random",
        **{**SHAPES, "window": window},
    )
    inputs = build(case)
    offsets = torch.tensor(DOCUMENTS[documents], dtype=torch.int32)
    inputs = inputs._replace(cu_seqlens=offsets)
    if kind is Kind.WINDOW:
        return inputs
    pool_offsets = split_pool(
        offsets, case.pool, case.compress_ratio, torch.Generator().manual_seed(1)
    )
    return inputs._replace(cu_seqlens_k=pool_offsets)


def whole(inputs: Inputs) -> dict[str, Tensor]:
    alone = attention_run()(inputs)
    return {"output": alone.output, "lse": alone.lse, **gradient_tensors(alone.gradients)}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], rows: int, name: str) -> None:
    for key, tensor in found.items():
        other = wanted[key]
        if key in ("output", "lse"):  # rows past the last document are undefined there
            tensor, other = tensor[:, :, :rows], other[:, :, :rows]
        torch.testing.assert_close(tensor, other, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


def compare_at_seams() -> None:
    for kind in Kind:
        for documents, window in CASES:
            inputs = seam_inputs(kind, documents, window)
            name = f"{kind.value}, {documents}, window {window}"
            assert_same(run_shared(inputs), whole(inputs), DOCUMENTS[documents][-1], name)


def recompute_the_backward() -> None:
    register_backend(Recomputing())
    for kind in Kind:
        inputs = seam_inputs(kind, "around seams", 6)
        found = run_shared(inputs, backend="recomputing")
        assert_same(found, whole(inputs), 24, kind.value)


def share_thd() -> None:
    inputs = seam_inputs(Kind.GATHER, "around seams", 6)
    expected = run_shared(inputs)
    mine = rank_inputs(inputs)
    for name in ("query", "local_kv", "sparse_kv"):
        mine[name] = mine[name].detach()[0].transpose(0, 1).requires_grad_()
    mine["kv_indices"] = mine["kv_indices"][0]
    output = context_parallel_attention(**mine, layout="THD")
    output.backward(part(inputs.grad_output, 2)[0].transpose(0, 1))
    torch.testing.assert_close(output.transpose(0, 1)[None], part(expected["output"], 2))
    for name in ("query", "local_kv", "sparse_kv"):
        found = mine[name].grad.transpose(0, 1)[None]
        torch.testing.assert_close(found, part(expected[f"d{name}"], 2), msg=name)


def want_some_gradients() -> None:
    """What needs none gets none, and its messages are not sent."""
    inputs = seam_inputs(Kind.GATHER, "around seams", 6)
    wanted = whole(inputs)
    for names in (("query",), ("local_kv",), ("sparse_kv", "attention_sink")):
        some = inputs._replace(
            **{name: getattr(inputs, name).detach() for name in GRADIENT_INPUTS}
        )
        for name in names:
            getattr(some, name).requires_grad_()
        assert_same(run_shared(some), wanted, 24, str(names))


def differentiate_twice() -> None:
    mine = rank_inputs(seam_inputs(Kind.WINDOW, "one", 6))
    output = context_parallel_attention(**mine)
    (first,) = torch.autograd.grad(output.sum(), mine["query"], create_graph=True)
    for second in ("query", "local_kv"):
        with pytest.raises(
            RuntimeError, match=r"context_parallel_attention\(\) is differentiable once"
        ):
            torch.autograd.grad(first.sum(), mine[second], retain_graph=True)


def compile_every_kind() -> None:
    step: Any = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    for kind in Kind:
        inputs = seam_inputs(kind, "around seams", 6)
        found = run_shared(inputs, call=step)
        assert_same(found, whole(inputs), 24, kind.value)


def keep_results_in_a_selective_checkpoint() -> None:
    """Recomputing on one rank alone, or refusing to, would leave its neighbour waiting."""
    operator = torch.ops.csa_dispatch.attention.default

    def policy(_context: Any, called: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = called is operator
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def step(**arguments: Any) -> Any:
        return checkpoint(
            context_parallel_attention,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
            **arguments,
        )

    for window in (1, 6):
        inputs = seam_inputs(Kind.GATHER, "around seams", window)
        assert_same(run_shared(inputs, call=step), whole(inputs), 24, f"window {window}")


def allocated(run: Any, arguments: dict[str, Any]) -> int:
    """Bytes that operators allocate for results, both directions."""
    inputs = [arguments["query"], arguments["local_kv"]]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.autograd.grad(run(**arguments).sum(), inputs)
    return sum(max(event.self_cpu_memory_usage, 0) for event in profiled.events() or ())


def copy_nothing_as_long_as_the_shard() -> None:
    tokens, heads, head_dim = 600, 3, 16
    made: dict[str, Any] = {
        "query": torch.randn(1, heads, tokens, head_dim, requires_grad=True),
        "local_kv": torch.randn(1, 1, tokens, head_dim, requires_grad=True),
        "sliding_window_size": 3,
    }
    bytes_of_query = made["query"].nbytes
    alone = allocated(attention, made)
    assert alone > 2 * bytes_of_query  # the output and the query's gradient
    shared = allocated(context_parallel_attention, made)
    assert shared < alone + bytes_of_query / 2, f"rank {dist.get_rank()}: {shared} and {alone}"


def two_processes() -> None:
    compare_at_seams()
    recompute_the_backward()
    share_thd()
    want_some_gradients()
    differentiate_twice()
    compile_every_kind()
    keep_results_in_a_selective_checkpoint()
    copy_nothing_as_long_as_the_shard()


def four_processes() -> None:
    compare_at_seams()
    recompute_the_backward()


def test_seams_of_two_processes() -> None:
    """Also with some gradients, in THD, compiled, checkpointed; and nothing long is copied."""
    run_processes(2, two_processes)


def test_seams_of_four_processes() -> None:
    run_processes(4, four_processes)
