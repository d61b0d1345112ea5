"""The picture: loss curves, where attention goes, and what the indexers pick over training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .mass import AttentionMass
from .picks import Picks
from .train import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, HELD_OUT, GREY = "#9db8d2", "#12365c", "#6b7580"
PARTS = (("window", "#2f6f9f"), ("selected", "#e0a030"), ("sink", "#b9bfc4"))
"""Colours that stay apart in grey and for colour-blind readers."""


def picture(history: History, masses: Sequence[AttentionMass]) -> bytes:
    """Loss curves and attention mass, and below them recall and picks over training: a PNG."""
    # Not pyplot: no global state, and the Agg canvas whatever the machine's default is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = 2 if history.picks else 1
    figure = Figure(figsize=(11, 4.4 * rows), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2, width_ratios=(1.25, 1), squeeze=False)
    _losses(panels[0, 0], history)
    _masses(panels[0, 1], masses)
    if history.picks:
        _recall(panels[1, 0], history.picks)
        _picked(panels[1, 1], history.picks)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)  # pyright: ignore
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _losses(axes: Axes, history: History) -> None:
    steps = [item.step for item in history.steps]
    axes.plot(steps, [item.loss for item in history.steps], color=TRAIN, lw=1, label="training")
    measured = history.held_out
    axes.plot(
        [item.step for item in measured],
        [item.loss for item in measured],
        color=HELD_OUT,
        lw=1.8,
        marker="o",
        ms=4,
        label="held-out files",
    )
    lines = (
        ("bytes, order 0", history.baselines.order0, GREY),
        ("pairs, order 1", history.baselines.order1, GREY),
    )
    for _, loss, colour in lines:
        axes.axhline(loss, color=colour, lw=1, ls=(0, (4, 3)), zorder=1)
    labels = (*lines, ("held-out", measured[-1].loss, HELD_OUT))
    for height, (name, loss, colour) in _apart(labels):
        axes.annotate(
            f"{name} {loss:.2f}",
            (1.01, height),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            fontsize=9,
            annotation_clip=False,
        )
    axes.set_ylim(0, max(8.5, measured[0].loss + 0.3))
    axes.set_xlim(0, max(steps) * 1.01)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title("Loss on the standard library's sources", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper right")


def _apart(labels: Sequence[tuple[str, float, str]]) -> list[tuple[float, tuple]]:
    """Labels with heights that leave each a line, lowest first, in their values' order."""
    placed: list[tuple[float, tuple]] = []
    for label in sorted(labels, key=lambda item: item[1]):
        height = label[1]
        if placed:
            height = max(height, placed[-1][0] + 0.4)
        placed.append((height, label))
    return placed


def _masses(axes: Axes, masses: Sequence[AttentionMass]) -> None:
    names = [f"layer {mass.layer}, {mass.label}" for mass in masses]
    position = list(range(len(masses)))
    start = [0.0] * len(masses)
    for part, colour in PARTS:
        width = [getattr(mass, part) for mass in masses]
        bars = axes.barh(position, width, left=start, color=colour, label=part, height=0.7)
        for bar, share in zip(bars, width, strict=True):
            if share >= 0.06:
                axes.annotate(
                    f"{share:.0%}",
                    (bar.get_x() + share / 2, bar.get_y() + bar.get_height() / 2),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if part == "window" else "#1d2327",
                )
        start = [a + b for a, b in zip(start, width, strict=True)]
    axes.set_yticks(position, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("share of the softmax")
    axes.set_title("Attention mass", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.04), ncols=3)


def _recall(axes: Axes, picks: Sequence[Picks]) -> None:
    steps = [item.step for item in picks]
    lines = (
        ("indexers", [item.recall for item in picks], HELD_OUT, "-"),
        ("as they began", [item.unlearned for item in picks], TRAIN, "-"),
        ("random", [item.chance for item in picks], GREY, (0, (4, 3))),
    )
    for name, shares, colour, dashes in lines:
        axes.plot(steps, shares, color=colour, lw=1.8, ls=dashes, label=name)
    axes.set_ylim(0, 1)
    axes.set_xlim(0, max(1, *steps) * 1.01)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("step")
    axes.set_ylabel("of attention's own best entries")
    axes.set_title("Recall of the indexers' picks", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower right")


def _picked(axes: Axes, picks: Sequence[Picks]) -> None:
    """One row a measurement: the entries that a token picks, and those it would weigh most."""
    for row, item in enumerate(picks):
        hits = [entry for entry in item.shown if entry in item.wanted]
        misses = [entry for entry in item.shown if entry not in item.wanted]
        axes.scatter(item.wanted, [row] * len(item.wanted), s=34, marker="s", color="#d5dce1")
        axes.scatter(misses, [row] * len(misses), s=14, marker="s", color=PARTS[1][1])
        axes.scatter(hits, [row] * len(hits), s=14, marker="s", color=HELD_OUT)
    names = (("#d5dce1", "best"), (HELD_OUT, "picked, best"), (PARTS[1][1], "picked, not best"))
    for colour, name in names:
        axes.scatter([], [], s=24, marker="s", color=colour, label=name)
    axes.set_yticks(range(len(picks)), [str(item.step) for item in picks])
    axes.invert_yaxis()
    axes.set_xlim(-1, picks[0].entries)
    axes.set_xlabel("entry, oldest first")
    axes.set_ylabel("step")
    axes.set_title("Picks of one token, first CSA layer", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=3)
