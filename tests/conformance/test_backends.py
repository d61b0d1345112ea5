"""Every backend of this repository that runs on a CPU keeps the contract it asks of others."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch import CallSpec, Capabilities, Reason, backends
from csa_dispatch.testing import check_backend
from csa_dispatch.testing.conformance_cases import BASE, device_base


@pytest.mark.parametrize("name", ["eager", "attention_gym"])
def test_backend_passes_every_check(name: str):
    row = backends()[name]
    if not row.available:
        pytest.skip(str(row.availability.reason))
    assert row.backend is not None
    report = check_backend(row.backend)
    report.raise_if_failed()
    ran = {check.name for check in report.checks if check.status == "pass"}
    assert {"claims", "gradients", "determinism", "operators", "field_cases"} <= ran
    assert 0 < max(check.share or 0 for check in report.checks) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager", "attention_gym"])
def test_backend_passes_the_full_level(name: str):
    backend = backends()[name].backend
    assert backend is not None
    check_backend(backend, level="full").raise_if_failed()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_backend_passes_every_check_on_cuda(name: str):
    backend = backends()[name].backend
    assert backend is not None
    report = check_backend(backend, "cuda")
    report.raise_if_failed()
    assert "sync" in {check.name for check in report.checks if check.status == "pass"}


def test_calls_are_found_where_a_predicate_refuses_the_usual_ones() -> None:
    def wide(spec: CallSpec) -> Reason | None:
        """head_dim of 64."""
        if spec.head_dim == 64:
            return None
        return Reason("head_dim", str(spec.head_dim), "64", "Use eager.")

    claim = Capabilities(predicates=(wide,))
    base = device_base(claim, claim, "cuda", 90)
    assert {name for name in base if base[name] != BASE[name]} == {"head_dim"}
    assert base["head_dim"] == (64,)
    assert device_base(Capabilities(), None, "cuda", 90) == BASE


def test_calls_are_found_for_both_sides_on_the_device_itself() -> None:
    def narrow(spec: CallSpec) -> Reason | None:
        """head_dim of 64 on an H100."""
        if (spec.device_type, spec.capability, spec.head_dim) == ("cuda", 90, 64):
            return None
        return Reason("head_dim", str(spec.head_dim), "64", "Use eager.")

    def nothing(spec: CallSpec) -> Reason | None:
        """No call."""
        return Reason("head_dim", str(spec.head_dim), "none", "Use eager.")

    claim, all_calls = Capabilities(predicates=(narrow,)), Capabilities()
    for sides in ((claim, None), (claim, all_calls), (all_calls, claim)):
        assert device_base(*sides, "cuda", 90)["head_dim"] == (64,)
    assert device_base(claim, None, "cuda", 80) == BASE
    assert device_base(Capabilities(predicates=(nothing,)), None, "cuda", 90) == BASE
