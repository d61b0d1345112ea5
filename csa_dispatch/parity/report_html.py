"""The HTML report: one file without external resources, readable in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from csa_dispatch.policy import Entry

from .console import seconds_text, share_text
from .files import write_atomically
from .results import CellReport, ParityRun, Status

BINS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Upper ends of the heat map's colours, as shares of the budget."""

_BAND = 40
"""Cases side by side in the overview before it starts a new band."""

_TEMPLATE = "parity.html"


@dataclass(frozen=True)
class Tile:
    """One cell as the report draws it.

    Attributes:
        style: CSS class: ``b0`` to ``b4`` by share of budget, ``refused``, or the status.
        text: what stands in the cell.
        title: the tooltip, and what a screen reader says.
        target: the id of the element that says more.
    """

    style: str
    text: str
    title: str
    target: str

    @property
    def mark(self) -> str:
        """What the overview's small cell has room for."""
        return "✕" if self.style == "fail" else self.text.replace("%", "")


@dataclass(frozen=True)
class CaseRow:
    """One case, with a tile for each entry that has such a cell."""

    anchor: str
    name: str
    layout: str
    about: str
    tiles: Mapping[Entry, Tile]

    @property
    def statuses(self) -> str:
        return " ".join(dict.fromkeys(tile.style for tile in self.tiles.values()))


Band = list[tuple[Entry, list[Tile | None]]]
"""Some cases side by side: a line of tiles for each entry that has any of them."""


@dataclass(frozen=True)
class GroupView:
    """One group of the matrix: its rows, the entries that have any, and the overview's bands."""

    name: str
    summary: str
    rows: Sequence[CaseRow]
    entries: Sequence[Entry]
    bands: Sequence[Band]


@dataclass(frozen=True)
class Refusals:
    """Cells of one entry that share their Reasons."""

    entry: Entry
    status: Status
    reasons: tuple[str, ...]
    names: tuple[str, ...]


def html_text(run: ParityRun) -> str:
    """The run as a self-contained HTML page."""
    source = resources.files("csa_dispatch") / "reporting" / _TEMPLATE
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(share=share_text, duration=seconds_text)
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        run=run,
        statuses=list(Status),
        tensors=run.tensors,
        summaries=run.summaries(),
        groups=group_views(run),
        failures=[(f"f{number}", report) for number, report in enumerate(run.failures)],
        refusals=refusals(run),
        bins=_legend(),
        environment=_flat(run.environment),
    )


def write_html(run: ParityRun, path: str | Path) -> None:
    """Write the HTML report atomically."""
    write_atomically(path, html_text(run))


def group_views(run: ParityRun) -> list[GroupView]:
    """The heat map, group by group: a row for each case, a tile for each entry."""
    failures = {id(report): f"f{number}" for number, report in enumerate(run.failures)}
    groups: dict[str, dict[tuple[str, str, str], dict[Entry, CellReport]]] = {}
    for report in run.reports:
        rows = groups.setdefault(report.cell.group, {})
        rows.setdefault(report.cell.row, {})[report.cell.entry] = report
    views = []
    for position, (group, cases) in enumerate(groups.items()):
        members = []
        for number, reports in enumerate(cases.values()):
            anchor = f"g{position}c{number}"
            tiles = {
                entry: tile(report, failures.get(id(report), anchor))
                for entry, report in reports.items()
            }
            cell = next(iter(reports.values())).cell
            members.append(CaseRow(anchor, cell.name, cell.layout, cell.about, tiles))
        entries = [entry for entry in run.entries if any(entry in row.tiles for row in members)]
        bands = _bands(members, entries)
        views.append(GroupView(group, run.groups.get(group, ""), members, entries, bands))
    return views


def _bands(rows: Sequence[CaseRow], entries: Sequence[Entry]) -> list[Band]:
    bands: list[Band] = []
    for start in range(0, len(rows), _BAND):
        part = rows[start : start + _BAND]
        lines = [(entry, [row.tiles.get(entry) for row in part]) for entry in entries]
        bands.append([(entry, tiles) for entry, tiles in lines if any(tiles)])
    return bands


def tile(report: CellReport, target: str) -> Tile:
    """How one cell looks."""
    cell, status, share = report.cell, report.status, report.share
    where = f"{cell.entry}, {cell.name}, {cell.layout}"
    if status is Status.FAIL:
        text = "✕" if share is None or share <= 1 else share_text(share)
        return Tile("fail", text, f"{where}: fail, {report.message}", target)
    if status is Status.PASS and share is None:
        return Tile("refused", "✓", f"{where}: pass", target)
    if share is None:
        reasons = "; ".join(str(reason) for reason in report.reasons)
        text = "-" if status is Status.UNSUPPORTED else "n/a"
        return Tile(status.value, text, f"{where}: {status.value}, {reasons}", target)
    level = next(number for number, end in enumerate(BINS) if share <= end)
    worst = max(report.verdicts, key=lambda verdict: verdict.share)
    title = f"{where}: {share_text(share)} of the budget ({worst.name})"
    return Tile(f"b{level}", share_text(share), title, target)


def refusals(run: ParityRun) -> list[Refusals]:
    """Unsupported and unavailable cells, those with equal Reasons together."""
    found: dict[tuple[Entry, Status, tuple[str, ...]], list[str]] = {}
    for report in run.reports:
        if report.status in (Status.UNSUPPORTED, Status.UNAVAILABLE):
            reasons = tuple(str(reason) for reason in report.reasons)
            key = (report.cell.entry, report.status, reasons)
            found.setdefault(key, []).append(report.cell.name)
    return [Refusals(*key, tuple(names)) for key, names in found.items()]


def _legend() -> list[tuple[str, str]]:
    starts = (0.0, *BINS[:-1])
    return [
        (f"b{number}", f"{start:.0%} to {end:.0%}")
        for number, (start, end) in enumerate(zip(starts, BINS, strict=True))
    ]


def _flat(environment: object) -> list[tuple[str, str]]:
    """Nested environment data as label and text."""
    found: list[tuple[str, str]] = []
    if isinstance(environment, dict):
        for name, value in environment.items():
            if isinstance(value, dict):
                found += [(f"{name} {key}", str(item)) for key, item in value.items()]
            else:
                found.append((str(name), str(value)))
    return found
