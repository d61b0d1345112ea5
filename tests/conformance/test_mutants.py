"""Every mutant is caught by the check that is about its fault."""

from __future__ import annotations

import pytest

from csa_dispatch.testing import MUTATIONS, PlainBackend, check_backend
from csa_dispatch.testing.conformance import CHECK_NAMES

EXPECTED = {
    "sink dropped": "sinks",
    "sink scaled": "sinks",
    "sink rounded to bfloat16": "sinks",
    "sink gradient zero": "sinks",
    "sink gradient negated": "gradients",
    "window one longer": "window",
    "window one shorter": "window",
    "document bounds ignored": "documents",
    "pool offsets ignored": "documents",
    "duplicates collapsed": "duplicates",
    "dKV halved": "gradients",
    "dquery without scale": "scale",
    "scale ignored": "scale",
    "lse in base 2": "claims",
    "lse without sink": "sinks",
    "stale NaN rows leaking": "poison",
    "empty rows NaN": "empty_rows",
    "index 0 unused": "slots",
    "filler clamped to the last row": "slots",
    "negative index wraps": "slots",
    "validity by column": "slots",
    "last slot dropped": "slots",
    "first batch's slots for all": "batch",
    "KV heads interleaved": "heads",
    "entries counted early": "compressed",
    "heads past the first tile repeated": "heads",
    "columns past 64 unwritten": "head_dim",
    "output one percent off": "claims",
}


def test_every_mutant_has_its_check():
    assert {mutation.name for mutation in MUTATIONS} == set(EXPECTED)
    assert set(EXPECTED.values()) <= set(CHECK_NAMES)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutant_fails_the_check_about_its_fault(mutation):
    expected = EXPECTED[mutation.name]
    report = check_backend(PlainBackend(mutation), checks=[expected])
    assert [check.name for check in report.failures] == [expected]
    # A mutant that raises would be caught for the wrong reason.
    assert "Error" not in report.failures[0].message


def test_field_cases_catch_the_mutant_that_stands_for_their_fault():
    (mutation,) = [item for item in MUTATIONS if item.name == "validity by column"]
    report = check_backend(PlainBackend(mutation), checks=["field_cases"])
    assert [check.name for check in report.failures] == ["field_cases"]
    assert "G01-float32: output" in report.failures[0].message


def test_the_operation_without_a_fault_passes_everything():
    report = check_backend(PlainBackend())
    report.raise_if_failed()
    unsupported = {check.name for check in report.checks if check.status == "unsupported"}
    assert unsupported <= {"refusals", "sync", "operations", "lightning_indexer", "compress_kv"}
    assert [check.name for check in report.checks] == list(CHECK_NAMES)
