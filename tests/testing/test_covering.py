"""Generated cases cover what is claimed, and boundaries stand just outside."""

from __future__ import annotations

import itertools

import pytest

from csa_dispatch import FALSE, Between, Capabilities, Kind, OneOf
from csa_dispatch.testing import boundaries_for, build, cases_for, to_call
from csa_dispatch.testing.covering import AXES, claims

NARROW = Capabilities(
    kind=OneOf((Kind.GATHER,), others=(Kind.WINDOW, Kind.DENSE)),
    dtype=OneOf(("bfloat16", "float16"), others=("float32",)),
    device_type=OneOf(("cpu",), others=("cuda",)),
    heads=Between(1, 128),
    kv_heads=OneOf((1,), others=(2,)),
    head_dim=OneOf((512,), others=(511, 513)),
    slots=Between(128, None, 128),
    window=OneOf((0,), others=(1,)),
    strides=OneOf(("aligned", "unit"), others=("any",)),
    deterministic=FALSE,
)


def test_everything_claimed_is_covered_in_pairs():
    cases = cases_for(Capabilities(), Capabilities())
    free = ("dtype", "kind", "documents", "sink", "heads", "head_dim", "memory", "content")
    for one, other in itertools.combinations(free, 2):
        seen = {(getattr(case, one), getattr(case, other)) for case in cases}
        assert seen == set(itertools.product(AXES[one], AXES[other])), (one, other)
    assert len(cases) < 200


def test_every_subset_of_gradients_is_covered():
    cases = cases_for(Capabilities(), Capabilities())
    assert {case.needs_grad for case in cases} == set(AXES["needs_grad"])


def test_each_value_once_takes_a_handful():
    cases = cases_for(Capabilities(), Capabilities(), strength=1)
    assert len(cases) <= 20
    for axis in ("dtype", "kind", "heads", "head_dim", "needs_grad", "memory"):
        assert {getattr(case, axis) for case in cases} == set(AXES[axis])


def test_cases_stay_within_a_claim_and_reach_its_edges():
    cases = cases_for(NARROW, NARROW)
    assert all(claims(NARROW, NARROW, case.spec()) for case in cases)
    assert {1, 2, 128} <= {case.heads for case in cases}
    assert {case.slots for case in cases} == {128, 256}


def test_without_a_backward_no_case_needs_gradients():
    cases = cases_for(Capabilities(), None)
    assert cases
    assert not any(case.differentiable for case in cases)


def test_nothing_is_generated_for_a_device_that_is_not_claimed():
    assert cases_for(NARROW, NARROW, device_type="cuda", capability=90) == []


def test_axes_can_be_replaced():
    cases = cases_for(Capabilities(), Capabilities(), axes={"heads": (8,), "dtype": ("bfloat16",)})
    assert {(case.heads, case.dtype) for case in cases} == {(8, "bfloat16")}
    with pytest.raises(ValueError, match="colour"):
        cases_for(Capabilities(), axes={"colour": ("red",)})


def test_boundaries_step_outside_each_bound_and_are_refused_for_it():
    boundaries = boundaries_for(NARROW, NARROW)
    for boundary in boundaries:
        reasons = NARROW.reasons(boundary.spec)
        assert boundary.field in [reason.field for reason in reasons]
        if boundary.case is not None:
            assert boundary.case.spec() == boundary.spec
    expected = {
        (name, value) for name, allowed in NARROW.bounds().items() for value in allowed.outside()
    }
    assert {(item.field, getattr(item.spec, item.field)) for item in boundaries} == expected
    built = {item.field for item in boundaries if item.case is not None}
    assert built == set(NARROW.bounds()) - {"device_type"}


def test_a_backward_narrower_than_its_forward_has_boundaries_of_its_own():
    narrow = Capabilities(head_dim=OneOf((64,), others=(65,)))
    boundaries = boundaries_for(Capabilities(), narrow)
    assert [(item.field, item.spec.head_dim) for item in boundaries] == [("head_dim", 65)]
    assert boundaries[0].spec.differentiable


def test_a_boundary_of_another_kind_can_be_built():
    gather_only = Capabilities(kind=OneOf((Kind.GATHER,), others=(Kind.WINDOW, Kind.DENSE)))
    cases = [boundary.case for boundary in boundaries_for(gather_only)]
    kinds = [to_call(build(case)).kind for case in cases if case is not None]
    assert kinds == [Kind.WINDOW, Kind.DENSE]
