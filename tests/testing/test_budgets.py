"""Budgets let rounding through and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from csa_dispatch import Kind
from csa_dispatch.testing import (
    Case,
    build,
    gradient_tensors,
    judge,
    plain_forward,
    plain_gradients,
    targets,
    to_call,
)

DTYPES = ("float64", "float32", "bfloat16", "float16")


def plain_results(case: Case):
    """Targets of a case, and plain eager PyTorch's results by the same names."""
    inputs = build(case)
    call = to_call(inputs)
    output, lse = plain_forward(call)
    gradients = gradient_tensors(plain_gradients(call, inputs.grad_output))
    return targets(call, inputs.grad_output), {"output": output, "lse": lse, **gradients}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", tuple(Kind))
@pytest.mark.parametrize("content", ["random", "messy", "nan"])
def test_plain_pytorch_uses_at_most_half_of_its_budget(dtype, kind, content):
    """By construction: twice its own error is allowed."""
    wanted, found = plain_results(Case(dtype=dtype, kind=kind, content=content))
    for name, target in wanted.items():
        verdict = judge(target, found[name])
        assert verdict.passed, verdict
        assert verdict.share <= 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["output", "lse", "dquery", "dlocal_kv", "dsparse_kv", "dsink"])
def test_an_error_of_two_percent_exceeds_every_budget(dtype, name):
    wanted, found = plain_results(Case(dtype=dtype, heads=16))
    spoiled = torch.where(found[name].isfinite(), found[name] * 1.02, found[name])
    verdict = judge(wanted[name], spoiled)
    assert not verdict.passed
    assert verdict.share > 1
    assert "allowed" in verdict.message


def test_one_wrong_row_is_seen_among_many():
    """The Frobenius norm of a large tensor hides it, the largest element does not."""
    case = Case(dtype="bfloat16", tokens=256, heads=8, head_dim=16, content="random")
    wanted, found = plain_results(case)
    found["output"][0, 0, 200, 3] += 0.1
    assert "max" in judge(wanted["output"], found["output"]).message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_where_the_oracle_is_fails(value):
    wanted, found = plain_results(Case(content="random"))
    found["dquery"][0, 1, 2, 3] = value
    verdict = judge(wanted["dquery"], found["dquery"])
    assert "NaN or Inf" in verdict.message
    assert verdict.share == math.inf


def test_a_laundered_nan_fails():
    wanted, found = plain_results(Case(content="nan"))
    assert found["output"].isnan().any()
    assert "NaN or Inf" in judge(wanted["output"], found["output"].nan_to_num()).message


def test_the_wrong_sign_of_an_infinite_lse_fails():
    wanted, found = plain_results(Case(sink="none", window=0))
    assert found["lse"].isinf().any()
    flipped = torch.where(found["lse"].isinf(), math.inf, found["lse"])
    assert "NaN or Inf" in judge(wanted["lse"], flipped).message


def test_a_trace_in_a_row_nobody_sees_fails_however_small():
    wanted, found = plain_results(Case(content="messy"))
    unused = wanted["dsparse_kv"].zero.expand_as(found["dsparse_kv"])
    assert unused.any()
    found["dsparse_kv"][unused] = 1e-30
    assert "exactly 0" in judge(wanted["dsparse_kv"], found["dsparse_kv"]).message


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_of_zero_allows_rounding_and_no_more(dtype):
    """One key and no sink: its probability is 1 and dquery exactly 0 but for rounding."""
    case = Case(kind=Kind.WINDOW, dtype=dtype, window=1, sink="none", content="random")
    wanted, found = plain_results(case)
    inputs = build(case)
    terms = (inputs.grad_output.abs().max() * inputs.local_kv.abs().max()).item()
    step = torch.finfo(getattr(torch, dtype)).eps
    assert judge(wanted["dquery"], found["dquery"] + 0.01 * step * terms).passed
    assert not judge(wanted["dquery"], found["dquery"] + 100 * step * terms).passed


@pytest.mark.parametrize(
    "change", [lambda t: t.double(), lambda t: t[:, :1], lambda t: t[..., None]]
)
def test_the_wrong_dtype_or_shape_fails(change):
    wanted, found = plain_results(Case(heads=2))
    assert "expected torch.float32" in judge(wanted["lse"], change(found["lse"])).message
