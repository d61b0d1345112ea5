"""Running one cell: through the public call, with receipts, against the oracle."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from csa_dispatch.reasons import BackendRefused, Reason
from csa_dispatch.receipts import record_receipts
from csa_dispatch.routing import entry_reasons
from csa_dispatch.testing import Boundary, Case, CellResult, TensorVerdict, build
from csa_dispatch.testing.cases import Inputs
from csa_dispatch.testing.check import Outcome, Reference, attend, attention_run, check_case
from csa_dispatch.testing.field_case import FieldCase, check_field_case

from .results import Cell, CellReport, Status

_FRAMES = 3
"""Innermost frames of a backend's traceback that a report shows."""


class RecordedRun:
    """``attention()`` forced to a cell's backends, its receipts and its time kept.

    Attributes:
        faults: what the receipts say that must not be.
        receipts: of every run, as ``"forward eager"``.
        seconds: of all runs.
        trace: the innermost frames of an error.
        reasons: of a refusal.
    """

    def __init__(self, cell: Cell) -> None:
        self._run = attention_run(cell.entry.forward, cell.entry.backward, cell.layout)
        self._cell = cell
        self.faults: list[str] = []
        self.receipts: list[str] = []
        self.seconds = 0.0
        self.trace = ""
        self.reasons: tuple[Reason, ...] = ()

    def __call__(self, inputs: Inputs) -> Outcome:
        started = time.perf_counter()
        try:
            with record_receipts() as receipts:
                outcome = self._run(inputs)
                if inputs.query.is_cuda:
                    torch.cuda.synchronize(inputs.query.device)
        except BackendRefused as refusal:
            self.reasons = tuple(item for items in refusal.reasons.values() for item in items)
            raise
        except Exception as error:
            self.trace = _innermost(error)
            raise
        finally:
            self.seconds += time.perf_counter() - started
        entry = self._cell.entry
        expected = [f"forward {entry.forward}"]
        if any(inputs.needs_grad):
            expected.append(f"backward {entry.backward}")
        found = [f"{receipt.direction} {receipt.backend}" for receipt in receipts]
        self.receipts += found
        if found != expected:
            self.faults.append(
                f"receipts say that {', '.join(found) or 'nothing'} ran; "
                f"forced was {', '.join(expected)}"
            )
        return outcome


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in reversed(frames)
    )


def refused(reasons: tuple[Reason, ...]) -> Status:
    """The status of a cell that has Reasons."""
    absent = any(reason.field == "availability" for reason in reasons)
    return Status.UNAVAILABLE if absent else Status.UNSUPPORTED


def run_case(cell: Cell, case: Case, reference: Reference) -> CellReport:
    """Run a case that routing says the cell's backends support, and judge it."""
    run = RecordedRun(cell)
    result = check_case(case, run, reference=reference)
    if result.status == "unsupported":
        message = f"explain() says it runs, the call refused: {result.message}"
        return CellReport(cell, Status.FAIL, reasons=run.reasons, message=message)
    return _report(cell, run, result)


def run_field_case(cell: Cell, case: FieldCase, device: str) -> CellReport:
    """Run a field case, judged by the oracle and by what it states by hand."""
    run = RecordedRun(cell)
    try:
        result = check_field_case(case, run, device)
    except Exception as error:
        message = f"the case's own check raised {type(error).__name__}: {error}"
        return CellReport(cell, Status.FAIL, message=message, receipts=tuple(run.receipts))
    if result.status == "unsupported":
        return CellReport(cell, refused(run.reasons), reasons=run.reasons)
    return _report(cell, run, result)


def _report(cell: Cell, run: RecordedRun, result: CellResult) -> CellReport:
    messages = [result.message] if result.message else []
    if run.trace:
        messages.append(f"at {run.trace}")
    messages += run.faults
    return CellReport(
        cell,
        Status.FAIL if messages else Status.PASS,
        _worst(result.verdicts),
        message="; ".join(messages),
        receipts=tuple(run.receipts),
        seconds=run.seconds,
    )


def _worst(verdicts: Sequence[TensorVerdict]) -> tuple[TensorVerdict, ...]:
    """Of several calls' verdicts on the same tensor, the one nearest to failing."""
    found: dict[str, TensorVerdict] = {}
    for verdict in verdicts:
        known = found.get(verdict.name)
        if known is None or verdict.share > known.share:
            found[verdict.name] = verdict
    return tuple(found.values())


def run_boundary(cell: Cell, boundary: Boundary, device: str) -> CellReport:
    """Ask for a call just outside a claim: it must be refused with a Reason of that field.

    Routing is asked about the description; where the call can be built on ``device`` it is also
    made, and must raise.
    """
    spec, case = _differentiable(boundary)
    reasons = entry_reasons(spec, cell.entry, hypothetical=True)
    if boundary.field not in [reason.field for reason in reasons]:
        fields = ", ".join(reason.field for reason in reasons) or "none"
        message = f"no Reason of field {boundary.field} (Reasons: {fields})"
        return CellReport(cell, Status.FAIL, reasons=reasons, message=message)
    message = ""
    if case is not None and spec.device_type == device:
        message = _call_is_refused(cell, boundary.field, case, device)
    status = Status.FAIL if message else Status.PASS
    return CellReport(cell, status, reasons=reasons, message=message)


def _differentiable(boundary: Boundary) -> tuple:
    """The boundary's spec and case with every gradient asked for: a bound may be backward's."""
    case = boundary.case
    if case is not None:
        case = dataclasses.replace(case, needs_grad=(True, True, True, True))
        return boundary.spec._replace(needs_grad=case.needs_grad), case
    return boundary.spec._replace(needs_grad=(True, True, True, True)), None


def _call_is_refused(cell: Cell, field: str, case: Case, device: str) -> str:
    """Why the call was not refused as it must be; empty when it was."""
    inputs = build(case, device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.deterministic or before)
    try:
        attend(inputs, backend=cell.entry.forward, backward_backend=cell.entry.backward)
    except BackendRefused as refusal:
        fields = [reason.field for reasons in refusal.reasons.values() for reason in reasons]
        if field in fields or "availability" in fields:
            return ""
        return f"the call was refused without a Reason of field {field}: {refusal}"
    except Exception as error:
        return f"the call raised {type(error).__name__} ({error}), not BackendRefused"
    finally:
        torch.use_deterministic_algorithms(before)
    return "the call ran; it must be refused"
