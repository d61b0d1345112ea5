"""The terminal's view of a run: a progress bar while it lasts, tables when it is done."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .results import CellReport, ParityRun, Status, Summary, Worst
from .runner import Listener

_SHOWN_FAILURES = 20
_WIDE = 128
"""Columns of a terminal from which on every tensor gets one of the table's."""
_CLOSE = 0.8
"""A share of budget from here on is shown as a warning."""


@contextmanager
def progress(console: Console, title: str) -> Iterator[Listener]:
    """A progress bar for the block; yields the listener to give to ``run_matrix``."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
        TextColumn("{task.fields[current]}", style="dim"),
        console=console,
        transient=True,
    )
    failed = 0
    with bar:
        task = bar.add_task(title, total=None, failed="", current="")

        def listen(report: CellReport, done: int, total: int) -> None:
            nonlocal failed
            failed += report.status is Status.FAIL
            bar.update(
                task,
                completed=done,
                total=total,
                failed=f"[red]{failed} failed[/red]" if failed else "",
                current=escape(f"{report.cell.entry} {report.cell.group}"),
            )

        yield listen


def render(run: ParityRun) -> RenderableType:
    """Everything a reader at a terminal wants to know of a finished run."""
    parts: list[RenderableType] = [_Table(run)]
    if run.failures:
        parts.append(_failures(run.failures))
    for fault in run.faults:
        parts.append(Text(f"failed: {fault}", style="red"))
    parts += [Text(f"note: {note}", style="dim") for note in run.notes]
    parts.append(_verdict(run))
    return Group(*parts)


class _Table:
    """The backends' table: a column a tensor where the terminal is wide, else the worst alone."""

    def __init__(self, run: ParityRun) -> None:
        self._run = run

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        run = self._run
        title = f"Parity {escape(run.matrix)} on {run.device}: largest share of error budget used"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("backend", style="bold", no_wrap=True)
        for label in ("pass", "fail", "unsup." if not wide else "unsupported", "n/a"):
            table.add_column(label, justify="right", no_wrap=True)
        names = run.tensors if wide else []
        for name in names or ("worst",):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("slowest", justify="right", no_wrap=True)
        for summary in run.summaries():
            table.add_row(*_row(summary, names))
        yield table


def _row(summary: Summary, names: Sequence[str]) -> list[RenderableType]:
    counts: list[RenderableType] = [_number(status, summary) for status in Status]
    if names:
        shares = [_share(summary.worst.get(name)) for name in names]
    else:
        name = max(summary.worst, key=lambda name: summary.worst[name].share, default="")
        shares = [_share(summary.worst.get(name)).append(f" {name}")]
    slowest = summary.slowest
    time = "" if slowest is None else seconds_text(slowest.seconds)
    return [escape(str(summary.entry)), *counts, *shares, time]


def _number(status: Status, summary: Summary) -> Text:
    number = summary.counts[status]
    style = {Status.PASS: "green", Status.FAIL: "bold red"}.get(status, "dim")
    return Text(str(number) if number else "·", style=style if number else "dim")


def _share(worst: Worst | None) -> Text:
    if worst is None:
        return Text("·", style="dim")
    style = "bold red" if worst.share > 1 else "yellow" if worst.share > _CLOSE else ""
    return Text(share_text(worst.share), style=style)


def share_text(share: float) -> str:
    """A share of budget: ``"34%"``, over tenfold ``"12x"``, infinite ``"wrong"``."""
    if not math.isfinite(share):
        return "wrong"
    return f"{share:.0%}" if share < 10 else f"{share:.3g}x"


def seconds_text(seconds: float) -> str:
    """A duration with a unit: ``"34 ms"``, ``"2.1 s"``."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _failures(failures: Sequence[CellReport]) -> RenderableType:
    lines: list[RenderableType] = []
    for report in failures[:_SHOWN_FAILURES]:
        # Never wrapped: an id is there to be copied.
        line = Text(f"FAIL {report.cell.id}", style="bold red", no_wrap=True, overflow="ignore")
        lines.append(line)
        lines.append(Text(f"     {report.message}"))
    if len(failures) > _SHOWN_FAILURES:
        lines.append(Text(f"and {len(failures) - _SHOWN_FAILURES} more failures"))
    return Group(*lines)


def _verdict(run: ParityRun) -> Text:
    counts = ", ".join(
        f"{number} {status.value}" for status, number in run.counts.items() if number
    )
    end = f"{counts} in {run.seconds:.0f} s"
    if run.exit_code:
        return Text(f"parity failed: {end}", style="bold red")
    return Text(f"parity holds: {end}", style="bold green")
