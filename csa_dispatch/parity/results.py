"""What a parity run found: one report a cell, and the sums that every form of output shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from csa_dispatch.policy import Entry
from csa_dispatch.reasons import Reason
from csa_dispatch.testing import TensorVerdict

TENSORS = ("output", "lse", "dquery", "dlocal_kv", "dsparse_kv", "dsink")
"""Names of attention's compared tensors, in the order of display."""


class Status(str, Enum):
    """How a cell ended. ``UNAVAILABLE``: the backend cannot run on this machine at all."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True)
class Cell:
    """One thing to check on one backend, or on one pair of forward and backward.

    Attributes:
        kind: ``"case"``, ``"field"``, ``"indexer"``, ``"compressor"`` or ``"boundary"``.
        group: the matrix group it comes from.
        name: the case's name, the field case's id, or ``field=value`` of a boundary.
        layout: of the call.
        entry: which backend runs the forward and which the backward.
        about: the case in words, for a reader of the report.
    """

    kind: str
    group: str
    name: str
    layout: str
    entry: Entry
    about: str = ""

    @property
    def row(self) -> tuple[str, str, str]:
        """What the same check on another backend has in common with this one."""
        return self.group, self.name, self.layout

    @property
    def id(self) -> str:
        return "/".join((str(self.entry), self.group, self.layout, self.name))


@dataclass(frozen=True)
class CellReport:
    """How one cell ended.

    Attributes:
        verdicts: one for each compared tensor.
        reasons: why the backend does not run it (unsupported, unavailable, refused boundary).
        message: what is wrong; empty unless it failed.
        receipts: what ran, as ``"forward eager"``, in order.
        seconds: wall time of forward and backward, without oracle and comparison.
    """

    cell: Cell
    status: Status
    verdicts: tuple[TensorVerdict, ...] = ()
    reasons: tuple[Reason, ...] = ()
    message: str = ""
    receipts: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def share(self) -> float | None:
        """Largest share of budget any tensor used; None when nothing was compared."""
        return max((verdict.share for verdict in self.verdicts), default=None)

    def required(self, names: frozenset[str]) -> CellReport:
        """This report, a failure if it is unsupported or unavailable on required backends.

        A pair counts when both its backends are required: else the other one may refuse.
        """
        if self.status not in (Status.UNSUPPORTED, Status.UNAVAILABLE):
            return self
        if not names.issuperset(self.cell.entry):
            return self
        reasons = "; ".join(str(reason) for reason in self.reasons)
        message = f"required, but {self.status.value}: {reasons}"
        return replace(self, status=Status.FAIL, message=message)


@dataclass(frozen=True)
class Worst:
    """The largest share of budget that one tensor used, and in which cell."""

    share: float
    cell: Cell


@dataclass(frozen=True)
class Summary:
    """One entry's cells in sum.

    Attributes:
        counts: cells by status.
        worst: by tensor name.
        slowest: the report that took longest; None when nothing ran.
        seconds: of all its cells.
    """

    entry: Entry
    counts: Mapping[Status, int]
    worst: Mapping[str, Worst]
    slowest: CellReport | None
    seconds: float


@dataclass(frozen=True)
class ParityRun:
    """A whole run.

    Attributes:
        matrix, path, summary: the matrix's name, file and description.
        device: ``"cpu"`` or ``"cuda"``.
        backends: the names that were asked for.
        required: the names that must not go untested.
        reports: in the order they ran.
        groups: the matrix's groups by name, with their summaries.
        notes: what was left out, and why.
        faults: failures that belong to no cell, such as a required backend that ran nothing.
        environment: versions, device, date and command.
        seconds: wall time of the whole run.
    """

    matrix: str
    path: str
    summary: str
    device: str
    backends: tuple[str, ...]
    required: tuple[str, ...]
    reports: tuple[CellReport, ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def counts(self) -> dict[Status, int]:
        return count(self.reports)

    @property
    def failures(self) -> list[CellReport]:
        return [report for report in self.reports if report.status is Status.FAIL]

    @property
    def exit_code(self) -> int:
        """0 when nothing failed, else 1."""
        return 1 if self.failures or self.faults else 0

    @property
    def tensors(self) -> list[str]:
        """Names of the compared tensors: attention's, then those of other operations."""
        found = (verdict.name for report in self.reports for verdict in report.verdicts)
        return list(dict.fromkeys((*TENSORS, *found)))

    @property
    def entries(self) -> list[Entry]:
        """Every entry that has a cell: backends by themselves first, then pairs."""
        found = dict.fromkeys(report.cell.entry for report in self.reports)
        return sorted(found, key=lambda entry: entry.forward != entry.backward)

    def summaries(self) -> list[Summary]:
        """The sum of each entry's cells."""
        return [
            summarise(entry, [report for report in self.reports if report.cell.entry == entry])
            for entry in self.entries
        ]


def count(reports: Sequence[CellReport]) -> dict[Status, int]:
    """Reports by status, every status present."""
    return {status: sum(item.status is status for item in reports) for status in Status}


def summarise(entry: Entry, reports: Sequence[CellReport]) -> Summary:
    """Sum up the reports of one entry."""
    worst: dict[str, Worst] = {}
    for report in reports:
        for verdict in report.verdicts:
            share = math.inf if math.isnan(verdict.share) else verdict.share
            known = worst.get(verdict.name)
            if known is None or share > known.share:
                worst[verdict.name] = Worst(share, report.cell)
    ran = [report for report in reports if report.seconds > 0]
    slowest = max(ran, key=lambda report: report.seconds, default=None)
    seconds = sum(report.seconds for report in reports)
    return Summary(entry, count(reports), worst, slowest, seconds)
