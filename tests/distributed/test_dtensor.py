"""DTensor: batch, heads and both, outputs and gradients equal to the single process.

Also where ranks get unequal shards or none, and where heads cannot be split.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from csa_dispatch import attention
from csa_dispatch.distributed.sharding import heads_line_up
from csa_dispatch.functional import (
    attention_with_window_lse,
    compress_kv,
    indexer_scores,
    lightning_indexer,
)
from tests.core.probes import inputs
from tests.distributed.workers import run_processes

WHOLE = Replicate()
TP = {"query": Shard(1), "kv": WHOLE, "kv_indices": WHOLE, "attention_sink": Shard(0)}
GROUPED = {**TP, "kv": Shard(1)}
DP = {"query": Shard(0), "kv": Shard(0), "kv_indices": Shard(0), "attention_sink": WHOLE}


def placements(name: str, plans: list[dict[str, Any]]) -> list[Any]:
    key = "kv" if name.endswith("_kv") else name
    return [plan[key] for plan in plans]


def shard_and_compare(
    mesh: DeviceMesh,
    plans: list[dict[str, Any]],
    groups: int,
    compiled: bool = False,
    *,
    heads: int = 4,
    batch: int = 2,
    gathered: bool = False,
) -> None:
    """Compare with one process; ``gathered`` when DTensor has to replicate the call."""
    sizes = {"heads": heads, "groups": groups, "batch": batch, "tokens": 9}
    plain = inputs(grad=True, **sizes)
    call = partial(attention, sliding_window_size=3)
    expected = call(*plain)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()

    def distribute(name: str, tensor: Tensor) -> DTensor:
        made = distribute_tensor(tensor.detach(), mesh, placements(name, plans))
        return made.requires_grad_(tensor.is_floating_point())

    shared = {name: distribute(name, tensor) for name, tensor in plain._asdict().items()}
    step: Any = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    output = step(*shared.values())
    assert isinstance(output, DTensor)
    wanted = [WHOLE] * mesh.ndim if gathered else placements("query", plans)
    assert list(output.placements) == wanted
    upstream = distribute_tensor(weights, mesh, wanted)
    output.backward(upstream)
    torch.testing.assert_close(output.full_tensor(), expected)
    for name, tensor in plain._asdict().items():
        if tensor.is_floating_point():
            gradient = shared[name].grad
            assert gradient is not None
            torch.testing.assert_close(gradient.full_tensor(), tensor.grad, msg=name)


def two_way_cases() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for groups in (1, 4):
        heads = TP if groups == 1 else GROUPED
        for plan in (heads, DP):
            for compiled in (False, True):
                shard_and_compare(mesh, [plan], groups, compiled)
    for plan in (TP, GROUPED):  # one and a half KV heads a rank
        shard_and_compare(mesh, [plan], 3, heads=6, gathered=True)
    shard_and_compare(mesh, [GROUPED], 3, True, heads=12, gathered=True)
    shard_and_compare(mesh, [TP], 1, heads=5)
    packed_heads(mesh)
    mixed_arguments(mesh)
    other_functions(mesh)


def three_way_cases() -> None:
    """The third rank gets no head, or no batch entry; then KV heads that divide unevenly."""
    mesh = init_device_mesh("cpu", (3,))
    shard_and_compare(mesh, [TP], 1, compiled=True)
    shard_and_compare(mesh, [TP], 1)
    shard_and_compare(mesh, [DP], 1, batch=4)
    shard_and_compare(mesh, [GROUPED], 4)
    shard_and_compare(mesh, [GROUPED], 5, heads=10)  # 4, 4, 2 heads read 2, 2, 1 KV heads
    shard_and_compare(mesh, [GROUPED], 4, heads=12, gathered=True)


def four_way_cases() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    shard_and_compare(mesh, [DP, TP], 1)
    shard_and_compare(mesh, [DP, GROUPED], 2)
    shard_and_compare(mesh, [GROUPED, GROUPED], 6, heads=12, gathered=True)
    shard_and_compare(init_device_mesh("cpu", (4,)), [GROUPED], 6, heads=12, gathered=True)


def test_two_processes_by_batch_or_heads_equal_one() -> None:
    """Shared KV, a KV head per query head and fewer, packed documents, eager and compiled."""
    run_processes(2, two_way_cases)


def test_three_processes_with_unequal_shards_equal_one() -> None:
    run_processes(3, three_way_cases)


def test_four_processes_by_batch_and_heads_equal_one() -> None:
    run_processes(4, four_way_cases)


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (8,), (2, 2), (3, 2), (2, 3), (2, 2, 2)])
def test_heads_are_split_only_where_they_line_up_with_kv_heads(mesh: tuple[int, ...]) -> None:
    """Against torch's own chunks of the KV head that each query head reads."""

    def chunks(tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        if not ranks:
            return [tensor]
        rest, count = tensor[:0], ranks[0]
        parts = [*tensor.chunk(count), *[rest] * count][:count]
        return [piece for part in parts for piece in chunks(part, ranks[1:])]

    def reads_what_it_holds(groups: int, ratio: int, ranks: tuple[int, ...]) -> bool:
        kv_heads = torch.arange(groups)
        held, read = chunks(kv_heads, ranks), chunks(kv_heads.repeat_interleave(ratio), ranks)
        return all(
            torch.equal(mine.repeat_interleave(ratio), wanted)
            for mine, wanted in zip(held, read, strict=True)
        )

    for groups in range(2, 14):
        # torch does not split a dimension over more ranks than it has elements.
        possible = [
            ranks
            for count in range(1, len(mesh) + 1)
            for ranks in combinations(mesh, count)
            if prod(ranks) <= groups
        ]
        for ratio in range(1, 6):
            expected = all(reads_what_it_holds(groups, ratio, ranks) for ranks in possible)
            assert heads_line_up(groups * ratio, groups, mesh) == expected, (groups, ratio)


def mixed_arguments(mesh: DeviceMesh) -> None:
    """Refused by name, on every rank, unless torch is told to replicate plain tensors."""
    plain = inputs()._asdict()
    shared = {name: distribute_tensor(value, mesh, [WHOLE]) for name, value in plain.items()}
    for name in ("local_kv", "sparse_kv", "kv_indices", "attention_sink"):
        made = rf"distribute_tensor\({name}, query.device_mesh"
        with pytest.raises(TypeError, match=rf"^{name} is a plain Tensor.*a DTensor.*{made}"):
            attention(**{**shared, name: plain[name]})
        with pytest.raises(TypeError, match=rf"^{name} is a DTensor.*{name}\.to_local"):
            attention(**{**plain, name: shared[name]})
    offsets = {"cu_seqlens": torch.tensor([0, 3, 8]), "cu_seqlens_k": torch.tensor([0, 2, 6])}
    with pytest.raises(TypeError, match=r"^cu_seqlens is a plain Tensor"):
        attention(**shared, **offsets)
    with implicit_replication():
        output = attention(**{**plain, "query": shared["query"]})
    assert isinstance(output, DTensor)
    torch.testing.assert_close(output.full_tensor(), attention(**plain))


def other_functions(mesh: DeviceMesh) -> None:
    """They have no rules and take local tensors, which they say by name."""
    call = {
        name: distribute_tensor(value, mesh, [WHOLE]) for name, value in inputs()._asdict().items()
    }
    rows = distribute_tensor(torch.ones(2, 8, 4), mesh, [Shard(0)])
    heads = distribute_tensor(torch.ones(2, 3, 8, 4), mesh, [Shard(0)])
    local = torch.ones(2, 3, 8, 4)
    refused = {
        "query": partial(attention_with_window_lse, **call, sliding_window_size=3),
        "values": partial(compress_kv, rows, rows, torch.ones(4, 4), 4),
        "index_query": partial(lightning_indexer, heads, rows, rows, 2, compress_ratio=4),
        "index_keys": partial(indexer_scores, local, rows, rows, compress_ratio=4),
    }
    for name, function in refused.items():
        with pytest.raises(TypeError, match=rf"^{name} is a DTensor.*{name}\.to_local"):
            function()


def packed_heads(mesh: DeviceMesh) -> None:
    plain = inputs(grad=True)
    offsets = {
        "cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 2, 6], dtype=torch.int32),
    }
    expected = attention(*plain, **offsets, sliding_window_size=3)
    expected.sum().backward()
    shared = {
        name: distribute_tensor(tensor.detach(), mesh, placements(name, [TP])).requires_grad_(
            tensor.is_floating_point()
        )
        for name, tensor in plain._asdict().items()
    }
    replicated = {key: distribute_tensor(value, mesh, [WHOLE]) for key, value in offsets.items()}
    output = attention(*shared.values(), **replicated, sliding_window_size=3)
    output.sum().backward()
    torch.testing.assert_close(output.full_tensor(), expected)
    gradient = shared["local_kv"].grad
    assert gradient is not None
    torch.testing.assert_close(gradient.full_tensor(), plain.local_kv.grad)


def test_global_sink_with_local_heads_names_tensor_parallelism() -> None:
    local = inputs(heads=4)
    with pytest.raises(ValueError, match=r"attention_sink is of shape \[8\].*TP"):
        attention(*local[:4], torch.zeros(8))
