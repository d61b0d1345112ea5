"""Context parallelism: outputs and gradients equal the single process, within its error budget."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from csa_dispatch import attention
from csa_dispatch.call import Kind
from csa_dispatch.call_spec import GRADIENT_INPUTS
from csa_dispatch.distributed import context_parallel_attention, gather_shards
from csa_dispatch.testing import Case, attention_run, judge, targets
from csa_dispatch.testing.budgets import gradient_tensors
from csa_dispatch.testing.cases import Inputs, build, to_call
from tests.distributed.workers import run_processes

SPLIT = {"query": 2, "local_kv": 2, "sparse_kv": 2, "kv_indices": 1, "doc_ids": 1}
"""The dimension along which each argument is shared out."""

SHAPES = {"tokens": 24, "pool": 12, "heads": 3, "head_dim": 16, "window": 5, "compress_ratio": 2}


def exact_cases() -> list[Case]:
    """Every kind and way of packing, in fp64: one process and several agree to rounding."""
    found = [
        Case(kind=kind, dtype="float64", sink="same", documents=documents, **SHAPES)
        for kind in Kind
        for documents in ("none", "cu_seqlens")
    ]
    found += [
        Case(kind=kind, dtype="float64", sink="same", documents="doc_ids", batch=2, **SHAPES)
        for kind in (Kind.WINDOW, Kind.GATHER)
    ]
    found += [
        Case(
            kind=kind,
            dtype="float64",
            sink="same",
            documents=documents,
            **{**SHAPES, "window": window},
        )
        for kind, documents, window in [
            (Kind.WINDOW, "cu_seqlens", 7),  # as far as a neighbour of six tokens reaches
            (Kind.GATHER, "none", 0),
            (Kind.DENSE, "cu_seqlens", 1),
        ]
    ]
    return [
        *found,
        Case(kind=Kind.DENSE, dtype="float64", sink="same", batch=2, kv_heads=3, **SHAPES),
    ]


def budget_cases() -> list[Case]:
    return [
        Case(kind=kind, dtype="bfloat16", documents="cu_seqlens", **SHAPES)
        for kind in (Kind.GATHER, Kind.DENSE)
    ]


def part(tensor: Tensor, dim: int, group: Any = None) -> Tensor:
    size = tensor.shape[dim] // dist.get_world_size(group)
    return tensor.detach().narrow(dim, dist.get_rank(group) * size, size).contiguous()


def rank_inputs(inputs: Inputs, group: Any = None) -> dict[str, Any]:
    """This rank's arguments, with leaves of its own."""
    found = inputs._asdict()
    del found["grad_output"]
    for name, dim in SPLIT.items():
        if found[name] is not None:
            found[name] = part(found[name], dim, group)
    for name, wanted in zip(GRADIENT_INPUTS, inputs.needs_grad, strict=True):
        if wanted:
            found[name] = found[name].detach().requires_grad_()
    return found


def joined(tensor: Tensor, dim: int, group: Any = None) -> Tensor:
    return gather_shards(tensor.detach().contiguous(), dim=dim, group=group)


def run_shared(
    inputs: Inputs,
    call: Any = context_parallel_attention,
    backend: str | None = None,
    group: Any = None,
) -> dict[str, Tensor]:
    """All ranks' results put together, on every rank."""
    mine = rank_inputs(inputs, group)
    output, lse = call(**mine, return_lse=True, backend=backend, group=group)
    output.backward(part(inputs.grad_output, 2, group))
    found = {"output": joined(output, 2, group), "lse": joined(lse, 2, group)}
    for name, wanted in zip(GRADIENT_INPUTS, inputs.needs_grad, strict=True):
        if wanted and name == "attention_sink":
            found["dsink"] = mine[name].grad
            dist.all_reduce(found["dsink"], group=group)
        elif wanted:
            found[f"d{name}"] = joined(mine[name].grad, 2, group)
    return found


def compare_with_one_process(cases: list[Case], group: Any = None) -> None:
    for case in cases:
        inputs = build(case)
        found = run_shared(inputs, group=group)
        alone = attention_run()(inputs)
        wanted = {"output": alone.output, "lse": alone.lse, **gradient_tensors(alone.gradients)}
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, wanted[name], rtol=1e-9, atol=1e-12, equal_nan=True,
                msg=f"{case.name}: {name}",
            )  # fmt: skip


def judge_by_budget() -> None:
    for case in budget_cases():
        inputs = build(case)
        found = run_shared(inputs)
        if dist.get_rank() == 0:
            for name, target in targets(to_call(inputs), inputs.grad_output).items():
                verdict = judge(target, found[name])
                assert verdict.passed, f"{case.name}: {name}: {verdict.message}"


def split_along_tokens_by_dtensor() -> None:
    """DTensor has no rule for it, so attention() gets whole tensors; the other way refuses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    split = distribute_tensor(whole, mesh, [Shard(2)])
    output = attention(split, split, sliding_window_size=3)
    torch.testing.assert_close(
        output.full_tensor(),  # type: ignore[attr-defined]
        attention(whole, whole, sliding_window_size=3),
    )
    with pytest.raises(TypeError, match=r"query is a DTensor.*to_local"):
        context_parallel_attention(split, split, sliding_window_size=3)


def sum_over_ranks_in_fp32() -> None:
    """A pool row's gradients are what ranks' tokens got: 256, 1, -256 and 1, in every order.

    In bf16 256 + 1 is 256, whichever ranks are added first.
    """
    orders = torch.tensor(sorted(set(permutations((256.0, 1.0, -256.0, 1.0)))))
    upstream = orders[torch.arange(16) % len(orders), dist.get_rank()].bfloat16()
    rows = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    picks = torch.arange(4, dtype=torch.int32)[None, :, None]  # each token the whole of one row
    pool, gathered = (rows[:, :, :1].clone().requires_grad_() for _ in range(2))
    output = context_parallel_attention(rows, rows, pool, picks, sliding_window_size=0)
    for result in (output, gather_shards(gathered, dim=2)):
        result.backward(upstream.expand(result.shape))
    for leaf in (pool, gathered):
        assert torch.equal(leaf.grad, torch.full_like(leaf, 2)), leaf.grad


def two_processes() -> None:
    split_along_tokens_by_dtensor()
    compare_with_one_process(exact_cases())
    judge_by_budget()


def test_every_kind_equals_the_whole_sequence_on_one_process() -> None:
    """Two processes."""
    run_processes(2, two_processes)


def share_in_groups_of_two() -> None:
    """Each group has a sequence of its own, and its ranks are counted in it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    kinds = [Case(kind=kind, dtype="float64", sink="same", seed=number, **SHAPES) for kind in Kind]
    compare_with_one_process(kinds, groups[number])


def four_processes() -> None:
    compare_with_one_process(exact_cases())
    share_in_groups_of_two()
    sum_over_ranks_in_fp32()


def test_four_processes_equal_one() -> None:
    """Also as two groups of two."""
    run_processes(4, four_processes)


ROWS = torch.zeros(1, 2, 8, 16)


def test_there_must_be_a_process_group() -> None:
    with pytest.raises(ValueError, match="group is None, all processes, but there is no process"):
        context_parallel_attention(ROWS, ROWS, sliding_window_size=3)


def test_check_values_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="check_values is 'yes'"):
        context_parallel_attention(ROWS, ROWS, sliding_window_size=3, check_values="yes")  # type: ignore


def test_a_group_must_be_one() -> None:
    with pytest.raises(TypeError, match="group is a str"):
        context_parallel_attention(ROWS, ROWS, sliding_window_size=3, group="cp")  # type: ignore
