"""Running one cell: through the public call, with receipts, against the oracle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from csa_dispatch.reasons import BackendRefused, Reason
from csa_dispatch.receipts import record_receipts
from csa_dispatch.testing import Boundary, Case, CellResult, TensorVerdict
from csa_dispatch.testing.boundary import check_boundary
from csa_dispatch.testing.cases import Inputs
from csa_dispatch.testing.check import Outcome, Reference, attention_run, check_case, innermost
from csa_dispatch.testing.field_case import FieldCase, check_field_case
from csa_dispatch.testing.suites import Suite, directions

from .results import Cell, CellReport, Status


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
            self.trace = innermost(error)
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


def run_operation_case(cell: Cell, suite: Suite, case: Any, device: str) -> CellReport:
    """Run a case of an operation beside attention that the cell's backend supports; judge it."""
    inputs = suite.inputs(case, device)
    started = time.perf_counter()
    try:
        with record_receipts() as receipts:
            found = suite.forced(cell.entry.forward, inputs)
            # Waits for the device.
            results = {name: item if item is None else item.cpu() for name, item in found.items()}
    except Exception as error:
        message = f"raised {type(error).__name__}: {error}; at {innermost(error)}"
        return CellReport(cell, Status.FAIL, message=message)
    seconds = time.perf_counter() - started
    ran = tuple(f"{receipt.direction} {receipt.backend}" for receipt in receipts)
    verdicts = tuple(suite.judge(case, results))
    faults = [f"{item.name}: {item.message}" for item in verdicts if item.message]
    if ran != tuple(f"{side} {cell.entry.forward}" for side in directions(case.spec())):
        faults.append(f"receipts say that {', '.join(ran) or 'nothing'} ran")
    return CellReport(
        cell,
        Status.FAIL if faults else Status.PASS,
        verdicts,
        message="; ".join(faults),
        receipts=ran,
        seconds=seconds,
    )


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
    """Ask for a call just outside a claim: it must be refused with a Reason of that field."""
    reasons, message = check_boundary(boundary, cell.entry, device)
    status = Status.FAIL if message else Status.PASS
    return CellReport(cell, status, reasons=reasons, message=message)
