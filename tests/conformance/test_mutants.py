"""Every mutant is caught by the check that is about its fault."""

from __future__ import annotations

import pytest
from torch import Tensor

from csa_dispatch import Call, Gradients
from csa_dispatch.testing import MUTATIONS, Mutation, PlainBackend, check_backend
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


def last_token_zero(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if output.shape[2] > 64:
        output[:, :, -1] = 0
    return output, lse


def slots_past_64_dropped(call: Call) -> Call:
    indices = call.kv_indices
    return call._replace(kv_indices=None if indices is None else indices[..., :64])


def long_pools_scaled(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    long = call.compress_ratio and call.sparse_kv is not None and call.sparse_kv.shape[2] > 32
    return output * 0.9 if long else output, lse


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation("last token past 64 zero", results=last_token_zero),
        Mutation("slots past 64 dropped", call=slots_past_64_dropped),
        Mutation(
            "window of at most 128",
            call=lambda c: c._replace(sliding_window_size=min(c.sliding_window_size, 128)),
        ),
        Mutation("pools past 32 scaled", results=long_pools_scaled),
    ],
    ids=lambda mutation: mutation.name,
)
def test_what_goes_wrong_past_the_first_tiles_is_caught(mutation):
    report = check_backend(PlainBackend(mutation), checks=["window", "compressed", "sizes"])
    assert [check.name for check in report.failures] == ["sizes"]
    assert "Error" not in report.failures[0].message


def test_doc_ids_are_compared_with_their_signs():
    def unsigned(call: Call) -> Call:
        return call if call.doc_ids is None else call._replace(doc_ids=call.doc_ids.abs())

    report = check_backend(PlainBackend(Mutation("unsigned", call=unsigned)), checks=["documents"])
    assert "docs=doc_ids" in report.failures[0].message


class DoublesExpanded(PlainBackend):
    """Takes an upstream gradient of stride 0 in one dimension alone twice."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim

    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        expanded = [dim for dim, step in enumerate(grad_output.stride()) if step == 0]
        if expanded == [self._dim]:
            grad_output = 2 * grad_output
        return super().backward(call, output, lse, grad_output, needs)


@pytest.mark.parametrize("dim", range(4))
def test_an_upstream_gradient_expanded_in_one_dimension_is_tried(dim: int):
    report = check_backend(DoublesExpanded(dim), checks=["strides"])
    assert [check.name for check in report.failures] == ["strides"]
    assert f"upstream expanded in dim {dim}" in report.failures[0].message


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
