"""Running a matrix: each case's oracle once, then every backend against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from csa_dispatch.call_spec import device_capability
from csa_dispatch.registry import known_backend
from csa_dispatch.routing import entry_reasons
from csa_dispatch.testing.check import Reference, reference_for

from .environment import environment
from .execute import refused, run_boundary, run_case, run_field_case, run_operation_case
from .expand import BoundaryWork, CaseWork, FieldWork, OperationWork, Selection, Work, expand
from .matrix import Matrix
from .reference import chunked_reference
from .results import CellReport, ParityRun, Status

Listener = Callable[[CellReport, int, int], None]
"""Called after every cell with its report, the number done and the number in all."""


def run_matrix(
    matrix: Matrix,
    *,
    backends: Sequence[str] = (),
    required: Sequence[str] = (),
    device: str | None = None,
    text: str = "",
    part: tuple[int, int] = (1, 1),
    listener: Listener | None = None,
) -> ParityRun:
    """Run every cell of ``matrix``; what a backend raises is a failed cell, and the run goes on.

    Args:
        matrix: what to run.
        backends: names; empty takes the matrix's, or else every known one.
        required: names whose unsupported and unavailable cells are failures; they are run even
            when ``backends`` does not name them.
        device: ``"cpu"`` or ``"cuda"``; None takes the matrix's.
        text: only cells whose id contains it.
        part: (i, n) runs the i-th of n parts, from 1.
        listener: told of every cell as it ends.

    Raises:
        ValueError: an unknown backend, a device that is not here, a part that is not one of 1
            to n, or nothing to run.
    """
    started = time.perf_counter()
    number, parts = part
    if not 1 <= number <= parts:
        raise ValueError(
            f"part is {number}/{parts}; it must be i/n with i from 1 to n, such as 1/4"
        )
    selection = replace(_select(matrix, backends, required, device, text), part=part)
    works, notes = expand(matrix, selection)
    total = sum(len(work.cells) for work in works)
    if not total:
        chosen = f"filter {text!r}" + (f", part {number}/{parts}" if parts > 1 else "")
        raise ValueError(
            f"{matrix.path}: no cell to run on {selection.device} ({chosen}); widen the filter"
        )
    needed = frozenset(required)
    reports: list[CellReport] = []
    faults: list[str] = []
    for report in _reports(works, selection):
        reports.append(report.required(needed))
        if listener is not None:
            listener(reports[-1], len(reports), total)
        if report.status is Status.FAIL and (error := _device_lost(selection.device)):
            left = total - len(reports)
            faults.append(f"{error} in {report.cell.id}: the other {left} cells did not run")
            break
    return ParityRun(
        matrix=matrix.name,
        path=matrix.path,
        summary=matrix.summary,
        device=selection.device,
        backends=selection.backends,
        required=tuple(required),
        reports=tuple(reports),
        groups={group.name: group.summary for group in matrix.groups},
        notes=tuple(notes),
        faults=(*faults, *_untested(reports, required)),
        environment=environment(selection.device, selection.backends),
        seconds=time.perf_counter() - started,
    )


def _select(
    matrix: Matrix,
    backends: Sequence[str],
    required: Sequence[str],
    device: str | None,
    text: str,
) -> Selection:
    from csa_dispatch.registry import backends as known

    for source, names in (("--backend", backends), ("--require", required)):
        for name in names:
            known_backend(name, source)
    for name in matrix.backends:
        known_backend(name, f"{matrix.path}: backends")
    names = dict.fromkeys([*(backends or matrix.backends or known()), *required])
    device = device or matrix.device
    capability = None
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch finds none here; pass --device cpu")
        capability = device_capability(torch.device("cuda", torch.cuda.current_device()))
    return Selection(tuple(names), device, capability, text)


def _untested(reports: Sequence[CellReport], required: Sequence[str]) -> Iterator[str]:
    """Required backends that computed nothing, although nothing of theirs failed either."""
    for name in dict.fromkeys(required):
        mine = [report for report in reports if name in report.cell.entry]
        ran = any(report.receipts for report in mine)
        if not ran and not any(report.status is Status.FAIL for report in mine):
            yield f"{name} is required, but no cell of this run exercised it"


def _device_lost(device: str) -> str:
    """What a kernel did to the process, when nothing can run on the device any more; else empty.

    After an illegal access every CUDA call of the process fails, whichever backend makes it.
    """
    if device != "cuda":
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return ""


def _reports(works: Sequence[Work], selection: Selection) -> Iterator[CellReport]:
    for work in works:
        yield from _run(work, selection)


def _run(work: Work, selection: Selection) -> Iterator[CellReport]:
    if isinstance(work, BoundaryWork):
        for cell in work.cells:
            yield run_boundary(cell, work.boundary, selection.device)
    elif isinstance(work, FieldWork):
        for cell in work.cells:
            yield run_field_case(cell, work.case, selection.device)
    elif isinstance(work, OperationWork):
        spec = work.case.spec(selection.device, selection.capability)
        for cell in work.cells:
            if reasons := entry_reasons(spec, cell.entry):
                yield CellReport(cell, refused(reasons), reasons=reasons)
            else:
                yield run_operation_case(cell, work.suite, work.case, selection.device)
    else:
        yield from _run_case(work, selection)


def _run_case(work: CaseWork, selection: Selection) -> Iterator[CellReport]:
    spec = work.case.spec(selection.device, selection.capability)
    reference: Reference | Exception | None = None
    for cell in work.cells:
        reasons = entry_reasons(spec, cell.entry)
        if reasons:
            yield CellReport(cell, refused(reasons), reasons=reasons)
            continue
        if reference is None:
            reference = _reference(work, selection.device)
        if isinstance(reference, Exception):
            message = f"no reference: {type(reference).__name__}: {reference}"
            yield CellReport(cell, Status.FAIL, message=message)
        else:
            yield run_case(cell, work.case, reference)


def _reference(work: CaseWork, device: str) -> Reference | Exception:
    """The case's data and targets, or what went wrong, which fails its cells but no others."""
    try:
        if work.group.reference == "chunked":
            return chunked_reference(work.case, device, work.group.sample_rows)
        return reference_for(work.case, device)
    except Exception as error:
        return error
