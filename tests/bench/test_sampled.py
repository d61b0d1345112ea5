"""The guard before timing lets right results pass and stops wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.bench.modes import deterministic, poisoned_memory
from csa_dispatch.bench.sampled import SampledRows, not_finite
from csa_dispatch.call_spec import deterministic_mode
from csa_dispatch.testing import PlainBackend, gradient_tensors, mutants
from tests.bench.test_inputs import case_of


def results_of(backend: PlainBackend, **fields: object) -> tuple[SampledRows, dict]:
    inputs = build_inputs(case_of(**fields), torch.device("cpu"))
    output, lse = backend.forward(inputs.call)
    needs = (True, True, inputs.call.sparse_kv is not None, True)
    gradients = backend.backward(inputs.call, output, lse, inputs.grad_output, needs)
    tensors: dict[str, Tensor | None] = {"output": output, "lse": lse}
    return SampledRows(inputs, gradients=True), tensors | gradient_tensors(gradients)


@pytest.mark.parametrize("kind", ["window", "gather", "dense-compressed"])
@pytest.mark.parametrize("indices", ["full", "causal", "messy"])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_results_are_within_budget(kind: str, indices: str, window: int, dtype: str) -> None:
    fields = {"kind": kind, "indices": indices, "window": window, "dtype": dtype, "batch": 2}
    sampled, tensors = results_of(PlainBackend(), kv_heads=2, heads=4, **fields)
    verdicts = sampled.verdicts(tensors)
    names = [verdict.name for verdict in verdicts]
    assert names == ["output", "lse", "dquery", "dlocal_kv"][: 4 if window else 3]
    assert not [verdict.message for verdict in verdicts if not verdict.passed]


@pytest.mark.parametrize("name", ["output", "lse", "dquery", "dlocal_kv"])
def test_each_tensor_is_looked_at(name: str) -> None:
    sampled, tensors = results_of(PlainBackend(), dtype="float32")
    tensors[name] = tensors[name] * 1.01
    assert [item.name for item in sampled.verdicts(tensors) if not item.passed] == [name]


@pytest.mark.parametrize(
    "mutant", [m for m in mutants() if m.name in ("sink dropped", "scale ignored", "dKV halved")]
)
def test_faults_are_caught(mutant: PlainBackend) -> None:
    sampled, tensors = results_of(mutant, indices="messy", dtype="float32")
    assert [item for item in sampled.verdicts(tensors) if not item.passed]


def test_unwritten_memory_is_seen() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        empty = torch.empty(5, 7)
        assert not deterministic_mode()
    assert not_finite({"a": torch.zeros(3), "b": empty, "c": None}) == [
        "b has 35 of 35 elements NaN or Inf"
    ]
    assert torch.are_deterministic_algorithms_enabled() is before


def test_deterministic_mode_does_not_fill_memory_and_ends() -> None:
    with deterministic(True):
        assert deterministic_mode()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with poisoned_memory():
            assert deterministic_mode()
            assert torch.empty(9).isnan().all()
    assert not deterministic_mode()
    assert torch.utils.deterministic.fill_uninitialized_memory
