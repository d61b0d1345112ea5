"""The suite can fail: every mutant is caught, and the operation without a fault passes."""

from __future__ import annotations

from functools import lru_cache

import pytest

from csa_dispatch import Capabilities
from csa_dispatch.testing import (
    MUTATIONS,
    Case,
    Mutation,
    PlainBackend,
    Reference,
    backend_run,
    cases_for,
    check_case,
    reference_for,
)

SMALL = {
    "heads": (1, 4, 20),
    "head_dim": (16, 80),
    "window": (5, 0, 1),
    "needs_grad": ((True, True, True, True), (False, False, False, True)),
}
"""Sizes that keep a run quick; the generation is the real one."""


@lru_cache(maxsize=4)
def suite(dtype: str) -> tuple[tuple[Case, Reference], ...]:
    """The generated cases of one dtype, with their references."""
    cases = cases_for(Capabilities(), Capabilities(), axes={**SMALL, "dtype": (dtype,)})
    return tuple((case, reference_for(case)) for case in cases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutant_is_caught(mutation: Mutation, dtype: str):
    run = backend_run(PlainBackend(mutation))
    results = (check_case(case, run, reference=reference) for case, reference in suite(dtype))
    failure = next((result for result in results if result.status == "fail"), None)
    assert failure is not None, f"no generated case notices: {mutation.name}"
    # A mutant that crashes would be caught for the wrong reason.
    assert failure.verdicts, failure.message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_operation_without_a_fault_passes_every_case(dtype: str):
    run = backend_run(PlainBackend())
    for case, reference in suite(dtype):
        result = check_case(case, run, reference=reference)
        assert result.status == "pass", f"{case.name}: {result.message}"
        assert result.share <= 0.5
