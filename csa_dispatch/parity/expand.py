"""From a matrix to its cells: which cases, in which layout, on which backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch

from csa_dispatch.capabilities import Capabilities
from csa_dispatch.policy import Entry
from csa_dispatch.registry import Row, backends
from csa_dispatch.testing import Boundary, Case, boundaries_for, cases_for
from csa_dispatch.testing.field_case import FieldCase
from csa_dispatch.testing.field_cases import field_cases
from csa_dispatch.testing.suites import SUITES, Suite
from csa_dispatch.toml_table import MatrixError

from .limits import Ledger
from .matrix import OPERATIONS, Group, Matrix
from .results import Cell

ANYTHING = Capabilities()


@dataclass(frozen=True)
class CaseWork:
    """One case in one layout, whose reference all its cells share."""

    group: Group
    case: Case
    layout: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class FieldWork:
    """One field case on every backend."""

    case: FieldCase
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class OperationWork:
    """One call of an operation beside attention on every backend that implements it."""

    suite: Suite
    case: Any
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class BoundaryWork:
    """One call just outside a backend's claim, which it must refuse."""

    boundary: Boundary
    cells: tuple[Cell, ...]


Work = CaseWork | FieldWork | OperationWork | BoundaryWork


@dataclass(frozen=True)
class Selection:
    """What of a matrix is wanted.

    Attributes:
        backends: names, in order of display.
        device: ``"cpu"`` or ``"cuda"``.
        capability: the CUDA device's compute capability as ``major * 10 + minor``.
        text: cells whose id does not contain it (in any case of letters) are left out.
        part: (i, n) takes the i-th of n parts, which together are everything; a case's cells are
            all in one of them.
    """

    backends: tuple[str, ...]
    device: str
    capability: int | None = None
    text: str = ""
    part: tuple[int, int] = (1, 1)


def expand(matrix: Matrix, selection: Selection) -> tuple[list[Work], list[str]]:
    """Every piece of work in the matrix, and notes on what limits left out.

    Raises:
        MatrixError: a group's axes make no case at all.
    """
    works: list[Work] = []
    ledger = Ledger(matrix.limits)
    seen: set[tuple[Entry, str, str]] = set()
    for position, group in enumerate(matrix.groups):
        if group.device not in ("", selection.device):
            continue
        for work in _group_works(matrix, position, selection):
            cells = tuple(cell for cell in work.cells if _wanted(cell, selection, seen))
            cells = ledger.keep(cells, lambda work=work: _sizes(work))
            if cells:
                works.append(replace(work, cells=cells))
    number, parts = selection.part
    notes = ledger.notes()
    if parts > 1:
        notes.append(
            f"part {number} of {parts}: {len(works[number - 1 :: parts])} of {len(works)} calls"
        )
    # One in every n, since neighbours take about as long as each other.
    return works[number - 1 :: parts], notes


def _wanted(cell: Cell, selection: Selection, seen: set[tuple[Entry, str, str]]) -> bool:
    """Whether a cell passes the filter and was not asked for by an earlier group."""
    if selection.text.lower() not in cell.id.lower():
        return False
    key = (cell.entry, cell.layout, cell.name)
    fresh = key not in seen
    seen.add(key)
    return fresh


def _sizes(work: Work) -> list[tuple[int, int]]:
    """Query rows and heads of each call that ``work`` makes; a boundary makes none."""
    if isinstance(work, CaseWork):
        return [(work.case.batch * work.case.tokens, work.case.heads)]
    if isinstance(work, FieldWork):
        shapes = [inputs.query.shape for inputs in work.case.calls(torch.device("cpu"))]
        return [(shape[0] * shape[2], shape[1]) for shape in shapes]
    return []


def _group_works(matrix: Matrix, position: int, selection: Selection) -> Iterator[Work]:
    group = matrix.groups[position]
    names = [name for name in selection.backends if not group.backends or name in group.backends]
    if group.source == "boundaries":
        for name in names:
            yield from _boundary_works(group, backends()[name], selection)
        return
    if group.source in OPERATIONS:
        yield from _operation_works(group, names)
        return
    pairs = permutations(names, 2) if group.crossed else ((name, name) for name in names)
    entries = [Entry(*pair) for pair in pairs]
    if group.source == "field":
        for case in field_cases(group.dtypes):
            cells = (
                Cell("field", group.name, case.name, "BHSD", entry, case.fault)
                for entry in entries
            )
            yield FieldWork(case, tuple(cells))
        return
    try:
        cases = _cases(group, names, selection)
    except ValueError as error:
        raise MatrixError(f"{matrix.path}: group[{position}].axes: {error}") from None
    for number, case in enumerate(cases):
        if group.crossed and not case.differentiable:
            continue
        layout = _layout(group.layouts, number, case)
        cells = (Cell("case", group.name, case.name, layout, entry) for entry in entries)
        yield CaseWork(group, case, layout, tuple(cells))


def _cases(group: Group, names: Sequence[str], selection: Selection) -> list[Case]:
    if group.source == "list":
        return list(group.cases)
    claims = [(ANYTHING, ANYTHING)]
    if group.source == "claims":
        rows = [backends()[name].backend for name in names]
        claims = [
            (plugin.forward_capabilities, plugin.backward_capabilities)
            for plugin in rows
            if plugin is not None
        ]
    return [
        case
        for forward, backward in claims
        for case in cases_for(
            forward,
            backward,
            device_type=selection.device,
            capability=selection.capability,
            axes=group.axes,
            strength=group.strength,
            seed=group.seed,
        )
    ]


def _operation_works(group: Group, names: Sequence[str]) -> Iterator[OperationWork]:
    suite = SUITES[OPERATIONS[group.source]]
    plugins = {name: backends()[name].backend for name in names}
    entries = [
        Entry(name, name)
        for name, plugin in plugins.items()
        if plugin is None or plugin.implementation(suite.operation) is not None
    ]
    for case in suite.cases(group.dtypes):
        cells = (Cell(group.source, group.name, case.name, "BHSD", entry) for entry in entries)
        yield OperationWork(suite, case, tuple(cells))


def _layout(layouts: tuple[str, ...], number: int, case: Case) -> str:
    """The layouts in turn; THD, which has no batch dimension, gives way when there is one."""
    usable = [name for name in layouts if name != "THD" or case.batch == 1] or ["BHSD"]
    wanted = layouts[number % len(layouts)]
    return wanted if wanted in usable else usable[number % len(usable)]


def _boundary_works(group: Group, row: Row, selection: Selection) -> Iterator[BoundaryWork]:
    plugin = row.backend
    if plugin is None:
        return
    device_type, capability = _claimed_device(plugin.forward_capabilities, selection)
    found = boundaries_for(
        plugin.forward_capabilities,
        plugin.backward_capabilities,
        device_type=device_type,
        capability=capability,
    )
    for boundary in found:
        value = getattr(boundary.spec, boundary.field)
        name = f"{boundary.field}={getattr(value, 'value', value)}"
        cell = Cell("boundary", group.name, name, "BHSD", Entry(row.name, row.name))
        yield BoundaryWork(boundary, (cell,))


def _claimed_device(claim: Capabilities, selection: Selection) -> tuple[str, int | None]:
    """The run's device, or another that the backend claims: a refusal needs no hardware."""
    if selection.device in claim.device_type:
        return selection.device, selection.capability
    device_type = next((value for value in claim.device_type.inside()), selection.device)
    capability = next((value for value in claim.capability.inside()), None)
    return str(device_type), capability if isinstance(capability, int) else None
