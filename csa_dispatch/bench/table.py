"""A run as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from csa_dispatch.parity.console import share_text
from csa_dispatch.parity.results import Status

from .results import MIB, BenchRow, BenchRun

_COLUMNS = (
    "ms",
    "IQR",
    "TFLOP/s",
    "used",
    "matmul",
    "copy",
    "extra",
    "budget",
    "must",
    "goal",
)
_LEFT_OUT = ("IQR", "used", "copy", "budget")
"""Columns that a terminal narrower than ``_FULL_WIDTH`` does without."""

_FULL_WIDTH = 130
_STYLES = {"goal": "bold green", "must": "green", "missed": "bold red"}


def render(run: BenchRun, width: int = _FULL_WIDTH) -> RenderableType:
    """The table for a terminal of ``width`` columns, what else there is to say, and a summary."""
    title = Text(f"Bench {run.suite} on {_machine(run)}", style="table.title")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("case", "direction", "backend"):
        table.add_column(name, no_wrap=True)
    columns = [name for name in _COLUMNS if width >= _FULL_WIDTH or name not in _LEFT_OUT]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    last: BenchRow | None = None
    for row in run.rows:
        new_case = last is None or last.case.name != row.case.name
        if new_case and last is not None:
            table.add_section()
        figures = _figures(run, row)
        table.add_row(
            Text(row.case.name if new_case else "", style="bold"),
            row.direction if new_case or last is None or last.direction != row.direction else "",
            escape(row.backend),
            *(figures.get(name, "") for name in columns),
            _verdict(run, row),
        )
        last = row
    notes = [Text(line, style="red") for line in _faults(run)]
    notes += [Text(line, style="yellow") for line in _unjudged(run)]
    notes += [
        Text(line, style="dim") for line in (*_launch_bound(run), *_refusals(run), _legend(run))
    ]
    return Group(table, *notes, _summary(run))


def _machine(run: BenchRun) -> str:
    return str(run.environment.get("device_name", run.device))


def _figures(run: BenchRun, row: BenchRow) -> dict[str, RenderableType]:
    """A row's cells by column; empty when it was not timed."""
    time, judgement, shares = row.time, run.judge(row), run.shares(row)
    if time is None:
        return {}
    budget = max((item.share for item in row.verdicts), default=None)
    return {
        "ms": Text(_milliseconds(time.median), style=_STYLES.get(judgement.word, "")),
        "IQR": _milliseconds(time.iqr),
        "TFLOP/s": _tera(row.nominal_rate),
        "used": _tera(row.used_rate),
        "matmul": _percent(shares.matmul),
        "copy": _percent(shares.copy),
        "extra": "" if row.extra_bytes is None else f"{row.extra_bytes / MIB:.1f}",
        "budget": "" if budget is None else share_text(budget),
        "must": _milliseconds(judgement.must_ms),
        "goal": _milliseconds(judgement.goal_ms),
    }


def _verdict(run: BenchRun, row: BenchRow) -> Text:
    if row.status is not Status.PASS:
        return Text(row.status.value, style="bold red" if row.status is Status.FAIL else "dim")
    judgement, growth = run.judge(row), run.growth(row)
    words = [judgement.word, "" if growth is None else f"{growth:.2f}x a token"]
    return Text(" ".join(filter(None, words)), style=_STYLES.get(judgement.word, ""))


def _faults(run: BenchRun) -> Iterator[str]:
    """What failed, and which limits were missed, a line each."""
    for row in run.rows:
        where = f"{row.case.name}, {row.direction}, {row.backend}"
        if row.status is Status.FAIL:
            yield f"failed: {where}: {row.message}"
        for text in run.judge(row).missed:
            yield f"missed: {where} {text}"


def _unjudged(run: BenchRun) -> Iterator[str]:
    """Limits of timed rows that the run has nothing to judge by, a line each."""
    for row in run.rows:
        for text in run.judge(row).unjudged:
            yield f"not judged: {row.case.name}, {row.direction}, {row.backend}: {text}"


def _launch_bound(run: BenchRun) -> Iterator[str]:
    """Rows whose device waits for the host's launches, a line each."""
    for row in run.rows:
        time, host = row.time, row.host
        if run.device != "cpu" and time is not None and host is not None:
            if host.median < time.median:
                continue
            yield (
                f"launch-bound: {row.case.name}, {row.direction}, {row.backend}: the host needs "
                f"{_milliseconds(host.median)} ms to launch it"
            )


def _refusals(run: BenchRun) -> Iterator[str]:
    """Every distinct Reason, with how many rows it explains."""
    found = Counter(f"{row.backend}: {reason}" for row in run.rows for reason in row.reasons)
    for text, times in found.items():
        yield f"cannot ({times} {'row' if times == 1 else 'rows'}): {text}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"


def _tera(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate / 1e12:.0f}" if rate >= 1e13 else f"{rate / 1e12:#.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _legend(run: BenchRun) -> str:
    matmul = ", ".join(f"{name} {_tera(rate)}" for name, rate in run.ceilings.matmul.items())
    return (
        f"measured ceilings: matrix product {matmul} TFLOP/s, copy {run.ceilings.copy / 1e9:.0f} "
        "GB/s. ms: median. TFLOP/s: by W + K keys a query; used: by visible keys, as is the share "
        "of the matmul ceiling; copy: least bytes, share of that ceiling. extra: MiB at peak "
        "beyond results. budget: share of error budget used on sampled rows."
    )


def _summary(run: BenchRun) -> Text:
    words = [run.judge(row).word for row in run.rows if row.samples]
    parts = [f"{len(words)} timed"]
    for word in ("goal", "must", "missed"):
        if words.count(word):
            parts.append(f"{words.count(word)} {word}")
    refused = sum(1 for row in run.rows if row.reasons)
    parts += [f"{refused} refused"] if refused else []
    parts += [f"{len(run.failures)} failed"] if run.failures else []
    style = "bold red" if run.failures else "bold yellow" if "missed" in words else "bold green"
    return Text(f"{', '.join(parts)} in {run.seconds:.0f} s", style=style)
