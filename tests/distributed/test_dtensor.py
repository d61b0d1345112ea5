"""DTensor: batch, heads and both, outputs and gradients equal to the single process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from csa_dispatch import attention
from tests.core.probes import inputs
from tests.distributed.workers import run_processes

WHOLE = Replicate()
TP = {"query": Shard(1), "kv": WHOLE, "kv_indices": WHOLE, "attention_sink": Shard(0)}
DP = {"query": Shard(0), "kv": Shard(0), "kv_indices": Shard(0), "attention_sink": WHOLE}


def placements(name: str, plans: list[dict[str, Any]]) -> list[Any]:
    key = "kv" if name.endswith("_kv") else name
    return [plan[key] for plan in plans]


def shard_and_compare(
    mesh: DeviceMesh, plans: list[dict[str, Any]], groups: int, compiled: bool
) -> None:
    sizes = {"heads": 4, "groups": groups, "batch": 2, "tokens": 9}
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
    assert list(output.placements) == placements("query", plans)
    upstream = distribute_tensor(weights, mesh, placements("query", plans))
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
        heads = TP if groups == 1 else {**TP, "kv": Shard(1)}
        for plan in (heads, DP):
            for compiled in (False, True):
                shard_and_compare(mesh, [plan], groups, compiled)
    packed_heads(mesh)


def four_way_case() -> None:
    shard_and_compare(init_device_mesh("cpu", (2, 2)), [DP, TP], 1, False)


def test_two_processes_by_batch_or_heads_equal_one() -> None:
    """Shared KV and a KV head per query head, packed documents, eager and compiled."""
    run_processes(2, two_way_cases)


def test_four_processes_by_batch_and_heads_equal_one() -> None:
    run_processes(4, four_way_case)


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
