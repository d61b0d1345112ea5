"""Faults other than wrong numbers are each caught by the check that is about them."""

from __future__ import annotations

import pytest

from csa_dispatch import backends
from csa_dispatch.testing import ConformanceError, check_backend
from tests.conformance import broken

EXPECTED = [
    (broken.WritesItsInputs, "inputs", "written to: query"),
    (broken.WritesItsInputs, "operators", "OpCheckError"),
    (broken.WritesAndRestores, "inputs", "written to: local_kv"),
    (broken.WritesTheUpstreamGradient, "inputs", "written to: grad_output"),
    (broken.WritesTheSavedOutput, "inputs", "written to: output"),
    (broken.WritesPastTheEnd, "canaries", "written beside: query"),
    (broken.ReturnsTheUpstreamGradient, "aliasing", "dquery in grad_output"),
    (broken.LiesAboutDeterminism, "determinism", "of 10 runs differ from the first"),
    (broken.WrongStrides, "results", "output has strides"),
    (broken.LseNotContiguous, "results", "lse has strides"),
    (broken.WrongDtype, "results", "output is torch.float32"),
    (broken.SinkGradientInTheQuerysDtype, "results", "dsink is torch.bfloat16"),
    (broken.KeepsTheGraph, "results", "output carries an autograd graph"),
    (broken.LeavesSpareRowsUnwritten, "unwritten", "output: NaN or Inf in the wrong places"),
    (broken.GivesGradientsNobodyAsked, "gradients", "is not asked for"),
    (broken.KeepsStateOfItsForward, "pairing", "not the output of the last forward"),
    (broken.ClaimsToUseTheLse, "pairing", "lse of the first half +inf: dquery"),
    (broken.AssumesContiguous, "strides", "dquery"),
    (broken.LaundersNan, "nan", "NaN or Inf in the wrong places"),
    (broken.ClaimsEveryHeadDim, "head_dim", "no kernel for this head_dim"),
    (broken.RefusesWhatItClaims, "documents", "claimed, but refused"),
    (broken.DelegatesToEager, "attention", "receipts of"),
    (broken.ClaimsTooMuch, "refusals", "dtype=bfloat16: no bound refuses it"),
    (broken.CallsItsOwnValuesOutside, "statement", "allows 'float64', which it calls outside"),
    (broken.UndocumentedPredicate, "statement", "has no docstring"),
    (broken.RemedyForNoBound, "statement", "remedy of head_dims: is for no bound"),
    (broken.NotesAreOneString, "statement", "not a tuple of str"),
    (broken.IsNotHere, "availability", "cannot run here"),
    (broken.RaisesInProbe, "availability", "ImportError: libcuda.so.1"),
    (broken.PickyAndWrong, "claims", "dquery"),
    (broken.PickyAndWrong, "head_dim", "dquery"),
    (broken.PickyAndWrong, "results", "output has strides"),
    (broken.PickyAndWrong, "inputs", "written to: query"),
    (broken.PickyAndWrong, "canaries", "written beside: query"),
    (broken.ReturnsNothing, "gradients", "forward returned None; it must return (output, lse)"),
    (broken.GivesThreeGradients, "gradients", "it must return Gradients"),
    (broken.GivesThreeGradients, "pairing", "it must return Gradients"),
    (broken.ProbesNothing, "availability", "returned None; it must return an Availability"),
    (broken.ClaimsNone, "availability", "forward_capabilities is None; it must be Capabilities"),
    (broken.ClaimsAString, "availability", "dtype='float32'; it must be a set"),
    (broken.RaisesInAPredicate, "availability", "in looks_up"),
    (broken.ClaimsNothingHere, "availability", "no call on cpu is claimed"),
]


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    EXPECTED,
    ids=[f"{kind.__name__}-{check}" for kind, check, _ in EXPECTED],
)
def test_each_fault_fails_its_check_and_is_named(kind, check, message):
    backend = kind()
    report = check_backend(backend, checks=[check])
    failed = {item.name: item for item in report.failures}
    assert set(failed) == {check}
    assert message in failed[check].message
    assert backend.name not in backends()
    with pytest.raises(ConformanceError, match=check):
        report.raise_if_failed()


@pytest.mark.parametrize(
    "kind", [broken.NotTraceable, broken.ForwardOnly, broken.ForwardHere, broken.BackwardOnly]
)
def test_what_is_not_claimed_is_not_held_against_a_backend(kind):
    report = check_backend(kind())
    report.raise_if_failed()
    unsupported = {item.name for item in report.checks if item.status == "unsupported"}
    expected = {
        broken.NotTraceable: {"determinism", "operators", "unwritten", "sync"},
        broken.ForwardOnly: {"pairing", "field_cases", "refusals", "sync"},
        broken.ForwardHere: {"pairing", "field_cases", "refusals", "sync"},
        broken.BackwardOnly: {"refusals", "sync"},
    }
    assert unsupported == expected[kind] | {"operations", "lightning_indexer", "compress_kv"}
