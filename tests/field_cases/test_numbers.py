"""Every field case that is a matter of numbers, on every backend that claims it."""

from __future__ import annotations

import pytest
import torch

import csa_dispatch
from csa_dispatch.call_spec import spec_of
from csa_dispatch.testing import (
    MUTATIONS,
    FieldCase,
    Mutation,
    PlainBackend,
    attention_run,
    backend_run,
    check_field_case,
    field_cases,
    to_call,
)
from csa_dispatch.testing.covering import claims

CASES = field_cases()


def claimed(backend: str, case: FieldCase) -> bool:
    """Whether the backend's Capabilities claim every call of ``case``."""
    found = csa_dispatch.backends()[backend].backend
    assert found is not None
    sides = found.forward_capabilities, found.backward_capabilities
    calls = case.calls(torch.device("cpu"))
    return all(claims(*sides, spec_of(to_call(inputs), inputs.needs_grad)) for inputs in calls)


def buildable(case: FieldCase) -> bool:
    """Whether this machine grants the address space of the case's inputs (4 GiB in G30)."""
    try:
        case.calls(torch.device("cpu"))
    except RuntimeError as error:
        return "can't allocate memory" not in str(error)
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_field_case_is_right(backend: str, case: FieldCase):
    if case.name.startswith("G30a") and not buildable(case):
        pytest.skip("needs 4 GiB of address space")
    with csa_dispatch.record_receipts() as receipts:
        result = check_field_case(case, attention_run(backend))
    if result.status == "unsupported":
        assert backend != "eager", result.message
        assert not claimed(backend, case), f"claimed, yet refused: {result.message}"
        pytest.skip(result.message)
    assert result.status == "pass", result.message
    assert {receipt.backend for receipt in receipts} == {backend}
    assert {receipt.direction for receipt in receipts} == {"forward", "backward"}


BEYOND = {"KV heads interleaved", "entries counted early"}
"""Mutants of grouped KV heads and of the dense-compressed kind, which no field case has."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_field_cases_catch_every_mutant_within_their_reach(mutation: Mutation):
    run = backend_run(PlainBackend(mutation))
    caught = any(
        check_field_case(case, run).status == "fail" for case in field_cases(("float32",))
    )
    assert caught == (mutation.name not in BEYOND)


def test_every_field_case_of_numbers_is_there():
    numbers = {case.name[:3] for case in CASES}
    # G13 and G14's bad scales are validation, G25, G26 and G33 behaviour, G31 memory: tests of
    # their own here. G28 and G29 need compile and CUDA graphs; G32 is the lse consumer's.
    elsewhere = {13, 25, 26, 28, 29, 31, 32, 33}
    assert numbers == {f"G{n:02}" for n in range(1, 31) if n not in elsewhere}
