"""Forward by FlexAttention itself, on a CPU; gradients by its meaning, since it has none there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from csa_backend_eager import backend as eager
from csa_backend_flex import FlexBackend, attend, backend, masks

import csa_dispatch
from csa_dispatch import CallSpec, Kind
from csa_dispatch.testing import (
    Case,
    attention_run,
    backend_run,
    build,
    cases_for,
    check_backend,
    check_case,
    to_call,
)
from tests.backends.flex import meaning

SMALL = {
    "tokens": (140, 1),
    "heads": (4, 1, 6),
    "head_dim": (16, 80),
    "window": (0, 1, 40),
    "pool": (140, 6),
    "batch": (1, 2),
    "dtype": ("float32", "bfloat16", "float16"),
}
CASES = cases_for(
    backend.forward_capabilities,
    dataclasses.replace(backend.backward_capabilities, device_type=csa_dispatch.ANY),
    axes=SMALL,
    strength=1,
)


@pytest.fixture
def by_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_flex", meaning.attend)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_claimed_value_is_right_forward(case: Case, without_dynamo: None):
    case = dataclasses.replace(case, needs_grad=(False,) * 4)
    result = check_case(case, backend_run(backend))
    assert result.status == "pass", f"{case.name}: {result.message}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_claimed_value_is_right_in_all_gradients(case: Case, by_meaning: None):
    result = check_case(case, backend_run(backend))
    assert result.status == "pass", f"{case.name}: {result.message}"


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.DENSE])
def test_nan_reaches_what_sees_it_and_no_more(kind: Kind, by_meaning: None):
    case = Case(kind, tokens=150, pool=70, window=20, compress_ratio=2, content="nan", kv_heads=2)
    result = check_case(case, backend_run(backend))
    assert result.status == "pass", result.message


def test_the_backward_takes_another_forward_s_output_and_lse(by_meaning: None):
    case = Case(Kind.DENSE, tokens=140, pool=35, documents="cu_seqlens", dtype="bfloat16")
    result = check_case(case, backend_run(eager, backend))
    assert result.status == "pass", result.message


@pytest.mark.parametrize("documents", ["none", "cu_seqlens"])
def test_kept_and_fresh_masks_give_the_same_bits(documents: str, by_meaning: None):
    case = Case(Kind.DENSE, tokens=140, pool=70, compress_ratio=2, documents=documents)
    inputs = build(case)
    call = to_call(inputs)

    def run():
        output, lse = backend.forward(call)
        return output, lse, *backend.backward(call, output, lse, inputs.grad_output, (True,) * 4)

    fresh = run()
    assert len(masks._masks) == (documents == "none")
    for one, other in zip(fresh, run(), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_it_keeps_the_contract(without_dynamo: None):
    report = check_backend(backend)
    report.raise_if_failed()
    ran = {check.name for check in report.checks if check.status == "pass"}
    assert {"claims", "compressed", "documents", "nan", "determinism", "attention"} <= ran


def test_attention_runs_it_as_flex_attention_does_by_itself():
    case = Case(Kind.WINDOW, tokens=9, needs_grad=(False,) * 4, documents="cu_seqlens")
    result = check_case(case, attention_run("flex"))
    assert result.status == "pass", result.message


TRAINING = CallSpec(kind=Kind.WINDOW, pool=0, slots=0, needs_grad=(True,) * 4)


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.DENSE])
def test_on_cuda_it_runs_both_directions(kind: Kind):
    spec = TRAINING._replace(kind=kind, index_dtype="none")
    if kind is Kind.DENSE:
        spec = spec._replace(pool=32, compress_ratio=128)
    decision = csa_dispatch.explain(spec, device="sm_90", backend="flex")
    assert (decision.forward, decision.backward) == ("flex", "flex")
    assert any("forward again" in note for note in decision.notes)


@pytest.mark.parametrize(
    ("device", "change", "field"),
    [
        ("cpu", {"tokens": 64}, "device_type"),
        ("cpu", {"needs_grad": (False,) * 4}, "scores_fit"),
        ("sm_90", {"dtype": "float64"}, "dtype"),
        ("sm_75", {}, "capability"),
        ("sm_90", {"head_dim": 8}, "head_dim"),
        ("sm_90", {"head_dim": 80}, "head_dim"),
        ("sm_90", {"head_dim": 512, "dtype": "float32"}, "head_dim"),
        ("sm_90", {"tokens": 2**17}, "addresses_fit"),
        ("sm_90", {"kind": Kind.GATHER, "pool": 8, "slots": 4}, "kind"),
    ],
)
def test_what_it_cannot_do_has_a_reason(device: str, change: dict, field: str):
    spec = TRAINING._replace(index_dtype="none")._replace(**change)
    if spec.kind is Kind.GATHER:
        spec = spec._replace(index_dtype="int32")
    decision = csa_dispatch.explain(spec, device=device, backend="flex")
    assert decision.forward is None
    reasons = decision.refused()["flex"]
    assert field in [reason.field for reason in reasons]
    assert all(reason.remedy for reason in reasons)


def test_on_a_cpu_it_is_a_forward_for_another_backward():
    spec = TRAINING._replace(tokens=64, index_dtype="none")
    decision = csa_dispatch.explain(spec, device="cpu", backend="flex", backward_backend="eager")
    assert (decision.forward, decision.backward) == ("flex", "eager")


def test_a_torch_without_auxiliary_outputs_is_refused(monkeypatch: pytest.MonkeyPatch):
    import torch.nn.attention.flex_attention as flex

    monkeypatch.delattr(flex, "AuxRequest")
    reason = FlexBackend().probe().reason
    assert reason is not None
    assert "return_aux" in reason.required
