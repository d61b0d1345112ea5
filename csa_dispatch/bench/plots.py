"""PNG figures: each backend under the machine's roofline, and time against T."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from csa_dispatch.parity.files import write_atomically

from .results import BenchRow, BenchRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {"forward": "o", "backward": "s", "both": "D"}


def write_png(run: BenchRun, path: str | Path) -> None:
    """Draw the run's timed rows and write the figure atomically.

    Raises:
        ValueError: nothing was timed.
        OSError: the place cannot be written to.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in run.rows if row.samples and row.work is not None]
    if not timed:
        raise ValueError(
            f"{path}: nothing was timed, so there is nothing to draw; measure it anew"
        )
    series = _series(timed)
    figure = Figure(figsize=(15 if series else 8, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if series else 1, squeeze=False)[0]
    colours = {name: f"C{place % 10}" for place, name in enumerate(run.backends)}
    _roofline(axes[0], run, timed, colours)
    if series:
        _against_tokens(axes[1], series, colours)
    name = run.environment.get("device_name", run.device)
    figure.suptitle(_plain(f"{run.suite} on {name}, {run.environment.get('date', '')}"))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def _roofline(
    axes: Axes, run: BenchRun, rows: Sequence[BenchRow], colours: dict[str, str]
) -> None:
    """FLOP/s of visible pairs against FLOPs a byte, under copy and matrix product rates."""
    labelled: set[str] = set()
    intensities: list[float] = []
    for row in rows:
        assert row.work is not None
        assert row.used_rate is not None
        intensity = row.work.used_flops / row.work.bytes
        intensities.append(intensity)
        label = f"{row.backend} {row.direction}"
        axes.plot(
            intensity,
            row.used_rate / 1e12,
            _MARKERS[row.direction],
            color=colours[row.backend],
            alpha=0.8,
            label=None if label in labelled else label,
        )
        labelled.add(label)
    least, most = min(intensities) / 3, max(intensities) * 3
    for place, (dtype, rate) in enumerate(run.ceilings.matmul.items()):
        corner = rate / run.ceilings.copy
        ends = [min(least, corner / 3), corner, max(most, corner * 3)]
        roof = [min(point * run.ceilings.copy, rate) / 1e12 for point in ends]
        axes.plot(ends, roof, "-", color="0.3", linewidth=1 + place, label=f"{dtype} roof")
    axes.set(xscale="log", yscale="log", title="Roofline (measured ceilings)")
    axes.set(xlabel="FLOPs of visible pairs a byte (least bytes)", ylabel="TFLOP/s")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")


def _series(rows: Sequence[BenchRow]) -> dict[tuple[str, str, str], list[BenchRow]]:
    """Timed rows by series, direction and backend, where there are several T."""
    found: dict[tuple[str, str, str], list[BenchRow]] = {}
    for row in rows:
        if row.case.series != row.case.name:
            key = (row.case.series, row.direction, row.backend)
            found.setdefault(key, []).append(row)
    return {key: points for key, points in found.items() if len(points) > 1}


def _against_tokens(
    axes: Axes, series: dict[tuple[str, str, str], list[BenchRow]], colours: dict[str, str]
) -> None:
    """Milliseconds against T; a dashed line is growth in proportion from the shortest call."""
    ticks: set[int] = set()
    for (name, direction, backend), rows in series.items():
        points = sorted((row.case.tokens, row.time.median) for row in rows if row.time)
        tokens = [count for count, _ in points]
        ticks.update(tokens)
        colour = colours[backend]
        axes.plot(
            tokens,
            [value for _, value in points],
            _MARKERS[direction] + "-",
            color=colour,
            alpha=0.8,
            label=_plain(f"{name} {direction} {backend}"),
        )
        first = points[0][1] / tokens[0]
        axes.plot(tokens, [first * count for count in tokens], "--", color=colour, alpha=0.4)
    axes.set(xscale="log", yscale="log", title="Time against T (dashed: in proportion)")
    axes.set(xlabel="T, query tokens", ylabel="ms (median)")
    axes.set_xticks(sorted(ticks), [str(count) for count in sorted(ticks)])
    axes.minorticks_off()
    axes.grid(True, alpha=0.2)
    axes.legend(fontsize="small")


def _plain(text: str) -> str:
    """``text`` without mathematics: matplotlib would parse what lies between dollar signs."""
    return text.replace("$", r"\$")
