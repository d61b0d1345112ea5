"""check_case tells a pass from every way to fail."""

from __future__ import annotations

import itertools

import pytest
import torch

from csa_dispatch import BackendRefused, Gradients, Kind
from csa_dispatch.testing import (
    Case,
    Inputs,
    Outcome,
    PlainBackend,
    attention_run,
    backend_run,
    check_case,
)

plain = backend_run(PlainBackend())


@pytest.mark.parametrize("kind", tuple(Kind))
def test_a_right_backend_passes_with_a_verdict_for_every_tensor(kind):
    result = check_case(Case(kind=kind), plain)
    assert (result.status, result.message) == ("pass", "")
    names = ["output", "lse", "dquery", "dlocal_kv", "dsparse_kv", "dsink"]
    if kind is Kind.WINDOW:
        names.remove("dsparse_kv")
    assert [verdict.name for verdict in result.verdicts] == names
    assert 0 < result.share <= 0.5


def test_only_the_gradients_asked_for_are_judged():
    result = check_case(Case(needs_grad=(False, True, False, False)), plain)
    assert [verdict.name for verdict in result.verdicts] == ["output", "lse", "dlocal_kv"]


def changed(**fields):
    """Plain results, then some of them replaced by what the functions make of them."""

    def run(inputs: Inputs) -> Outcome:
        outcome = plain(inputs)
        return outcome._replace(**{n: change(getattr(outcome, n)) for n, change in fields.items()})

    return run


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (changed(output=lambda out: out * 1.1), "output: Frobenius error"),
        (changed(lse=lambda lse: lse.mT.contiguous().mT), "lse has strides"),
        (changed(output=lambda out: out.mT.contiguous().mT), "output has strides"),
        (changed(gradients=lambda g: g._replace(query=None)), "gradient of query is missing"),
        (changed(output=lambda out: out.sum(7)), "IndexError"),
    ],
)
def test_each_fault_fails_and_is_named(run, message):
    result = check_case(Case(), run)
    assert result.status == "fail"
    assert message in result.message


def test_a_gradient_nobody_asked_for_fails():
    def run(inputs: Inputs) -> Outcome:
        outcome = plain(inputs)
        return outcome._replace(gradients=Gradients(inputs.query, *outcome.gradients[1:]))

    result = check_case(Case(needs_grad=(False, True, True, True)), run)
    assert "gradient of query is not asked for" in result.message


def test_a_refusal_is_unsupported_and_keeps_its_reasons():
    def run(_: Inputs) -> Outcome:
        raise BackendRefused("no", {"fa4": ()})

    assert check_case(Case(), run).status == "unsupported"


def test_a_deterministic_case_must_repeat_itself():
    calls = itertools.count()

    def run(inputs: Inputs) -> Outcome:
        assert torch.are_deterministic_algorithms_enabled()
        outcome = plain(inputs)
        return outcome._replace(lse=outcome.lse + 2e-6 * next(calls))

    case = Case(deterministic=True, content="random")
    assert check_case(case, plain).status == "pass"
    assert "two deterministic runs differ" in check_case(case, run).message
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "SBHD", "THD"])
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "strided"])
def test_attention_is_checked_in_every_layout(layout, memory):
    case = Case(memory=memory, documents="cu_seqlens", heads=4, kv_heads=2)
    result = check_case(case, attention_run("eager", layout=layout))
    assert result.status == "pass", result.message
