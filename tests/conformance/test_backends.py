"""Every backend of this repository that runs on a CPU keeps the contract it asks of others."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from csa_dispatch import CallSpec, Capabilities, Kind, Reason, backends
from csa_dispatch.testing import check_backend
from csa_dispatch.testing.conformance_cases import (
    BASE,
    FAMILIES,
    MESSY,
    NONE,
    Axes,
    device_axes,
    device_bases,
)
from csa_dispatch.testing.covering import cases_for


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


def usual_bases(claim: Capabilities, backward: Capabilities | None) -> list[Axes]:
    find = partial(cases_for, claim, backward, device_type="cuda", capability=90)
    return device_bases((claim, backward), find)


def test_calls_are_found_where_a_predicate_refuses_the_usual_ones() -> None:
    def wide(spec: CallSpec) -> Reason | None:
        """head_dim of 64."""
        if spec.head_dim == 64:
            return None
        return Reason("head_dim", str(spec.head_dim), "64", "Use eager.")

    claim = Capabilities(predicates=(wide,))
    (base,) = usual_bases(claim, claim)
    assert {name for name in base if base[name] != BASE[name]} == {"head_dim"}
    assert base["head_dim"] == (64,)
    assert usual_bases(Capabilities(), Capabilities()) == [BASE]


def test_kinds_are_found_apart_where_a_predicate_tells_them_apart() -> None:
    def wide_gathers(spec: CallSpec) -> Reason | None:
        """kv_indices: 16 heads of 64; no gradients."""
        if spec.kind is not Kind.GATHER:
            return None
        if (spec.head_dim, spec.heads) == (64, 16) and not spec.differentiable:
            return None
        return Reason("wide_gathers", "this", "that", "Use eager.")

    claim = Capabilities(predicates=(wide_gathers,))
    gathers, others = usual_bases(claim, claim)
    changed = {name: gathers[name] for name in gathers if gathers[name] != BASE[name]}
    assert changed == {
        "kind": (Kind.GATHER,), "head_dim": (64,), "heads": (16,), "needs_grad": (NONE,),
    }  # fmt: skip
    assert others == {**BASE, "kind": (Kind.DENSE, Kind.WINDOW)}


def test_every_family_gets_calls_of_a_backend_that_is_picky_on_one_device() -> None:
    row = backends()["attention_gym"]
    if not row.available:
        pytest.skip(str(row.availability.reason))
    backend = row.backend
    assert backend is not None
    sides = (backend.forward_capabilities, backend.backward_capabilities)
    find = partial(cases_for, *sides, device_type="cuda", capability=90)
    bases = device_bases(sides, find)
    for axes in (*(family.axes for family in FAMILIES), MESSY):
        found = [device_axes(axes, base, sides, find) for base in bases]
        assert any(find(axes=each, strength=1) for each in found), axes


def test_calls_are_found_for_both_sides_on_the_device_itself() -> None:
    def narrow(spec: CallSpec) -> Reason | None:
        """head_dim of 64 on an H100."""
        if (spec.device_type, spec.capability, spec.head_dim) == ("cuda", 90, 64):
            return None
        return Reason("head_dim", str(spec.head_dim), "64", "Use eager.")

    claim, all_calls = Capabilities(predicates=(narrow,)), Capabilities()
    for sides in ((claim, claim), (claim, all_calls), (all_calls, claim)):
        (base,) = usual_bases(*sides)
        assert base["head_dim"] == (64,)
    find = partial(cases_for, claim, claim, device_type="cuda", capability=80)
    assert device_bases((claim, claim), find) == [BASE]
