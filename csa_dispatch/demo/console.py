"""The terminal's view: progress while training runs, tables when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from csa_dispatch.parity.console import seconds_text, share_text

from .corpus import Corpus
from .mass import AttentionMass
from .model import LABELS, parameter_count
from .picks import Picks
from .replay import Cell, Explained
from .results import DemoResults, about, milliseconds_text
from .train import HeldOutLoss, History, Progress, StepLoss, TrainConfig

_LOOK: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": SIMPLE_HEAD}


def introduction(config: TrainConfig, corpus: Corpus) -> RenderableType:
    """What is about to be trained, on what."""
    layers = ", ".join(LABELS[kind] for kind in config.model.layers)
    sizes, weights = config.model, parameter_count(config.model)
    return Text.from_markup(
        f"[bold]Text[/bold]    {corpus.train.files} files of {escape(str(corpus.root))},\n"
        f"        {corpus.train.size / 1e6:.1f} MB to learn from; {corpus.held_out.files} other "
        f"files, {corpus.held_out.size / 1e6:.1f} MB, held out\n"
        f"[bold]Model[/bold]   {weights / 1e6:.1f} M weights; layers: {layers}\n"
        f"        window {sizes.window}; CSA ratio {sizes.csa_ratio}, top {sizes.top_k}; "
        f"HCA ratio {sizes.hca_ratio}\n"
        f"[bold]Steps[/bold]   {config.steps} of {config.batch} x {config.tokens} bytes "
        f"on {config.device}, seed {config.seed}\n"
    )


def _bar(console: Console, name: str) -> Bar:
    """A progress bar that leaves nothing behind; a task's description stands after the count."""
    return Bar(
        TextColumn(name),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def training(console: Console, config: TrainConfig) -> Iterator[Progress]:
    """A progress bar with the losses; a line for every held-out measurement."""
    smooth, held_out = 0.0, float("nan")
    mark = "▪" if console.encoding.startswith("utf") else "#"
    with _bar(console, "train") as bar:
        task = bar.add_task("", total=config.steps)

        def step(found: StepLoss) -> None:
            nonlocal smooth
            smooth = found.loss if found.step == 1 else 0.9 * smooth + 0.1 * found.loss
            losses = f"loss {smooth:.2f}  held-out {held_out:.2f} bits/byte"
            bar.update(task, completed=found.step, description=losses)

        def measure(found: HeldOutLoss) -> None:
            nonlocal held_out
            held_out = found.loss
            line = f"step {found.step:>4}  held-out {held_out:.3f} bits/byte  "
            console.print(Text(line) + Text(mark * round(held_out * 4), style="blue"))

        yield Progress(step, measure)


@contextmanager
def replaying(console: Console, total: int) -> Iterator[Callable[[Cell], None]]:
    """A progress bar over the replay's cells; yields what to call after each."""
    with _bar(console, "replay") as bar:
        task = bar.add_task("", total=total)

        def show(cell: Cell) -> None:
            text = f"layer {cell.layer} {cell.label}, {cell.where}, {cell.dtype}"
            bar.update(task, advance=1, description=text)

        yield show


def render(results: DemoResults) -> RenderableType:
    """Everything a reader wants to know of a finished demo."""
    parts: list[RenderableType] = [
        _learned(results.history, results.seconds),
        Text(),
        _explain_table(results.explained),
        Text(),
        _parity_table(results),
        Text(),
        _mass_table(results.masses),
        Text(),
        *([_picks_table(results.history.picks), Text()] if results.history.picks else []),
        _verdict(results),
    ]
    return Group(*parts)


def _learned(history: History, seconds: float) -> RenderableType:
    table = Table(title="Bits per byte on held-out files", **_LOOK)
    table.add_column("")
    table.add_column("bits/byte", justify="right")
    table.add_row("before training", f"{history.held_out[0].loss:.3f}")
    table.add_row("counts of bytes (order 0)", f"{history.baselines.order0:.3f}")
    table.add_row("counts of byte pairs (order 1)", f"{history.baselines.order1:.3f}")
    last = f"[bold]{history.held_out[-1].loss:.3f}[/bold]"
    table.add_row(f"after {len(history.steps)} steps ({seconds_text(seconds)})", last)
    return table


def _explain_table(explained: Sequence[Explained]) -> RenderableType:
    table = Table(title="explain: what runs each layer, and why", **_LOOK)
    for name in ("layers", "kind", "call", "forward", "backward"):
        table.add_column(name, no_wrap=True)
    notes: dict[str, list[str]] = {}
    for item in explained:
        decision, layers = item.decision, ", ".join(map(str, item.layers))
        table.add_row(
            layers, item.label, item.sizes, decision.forward or "none", decision.backward or "none"
        )
        notes.setdefault(f"{decision.why} (policy {decision.policy})", []).append(layers)
        for name, reasons in decision.refused().items():
            for reason in reasons:
                notes.setdefault(f"{name} cannot: {reason}", []).append(layers)
        for note in decision.notes:
            notes.setdefault(note, []).append(layers)
    every = len(explained)
    return Group(table, *(_note(about(text, layers, every)) for text, layers in notes.items()))


def _note(text: str) -> RenderableType:
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def _parity_table(results: DemoResults) -> RenderableType:
    dtypes = results.dtypes
    table = Table(
        title="parity: the trained layers on every backend, against the float64 oracle",
        **_LOOK,
    )
    table.add_column("layer", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for dtype in dtypes:
        table.add_column(dtype, justify="right", no_wrap=True)
        table.add_column("used", justify="right", no_wrap=True)
        table.add_column("ms", justify="right", no_wrap=True)
    layer_before = 0
    for cells in results.by_row():
        first = next(iter(cells.values()))
        name = f"{first.layer} {first.label}" if first.layer != layer_before else ""
        if name and layer_before:
            table.add_section()
        layer_before = first.layer
        columns = [part for dtype in dtypes for part in _cell_columns(cells.get(dtype))]
        table.add_row(name, first.where, *columns)
    columns = (
        "per dtype: worst relative error of output and gradients, the share of the error budget "
        "it uses, and the time of forward and backward"
    )
    return Group(table, *map(_note, (columns, *results.notes())))


def _cell_columns(cell: Cell | None) -> tuple[RenderableType, RenderableType, RenderableType]:
    if cell is None:
        return Text("-", style="dim"), Text("-", style="dim"), Text("-", style="dim")
    if not cell.verdicts:
        return Text("failed", style="bold red"), "", ""
    style = "bold red" if cell.status == "fail" else "green"
    used = Text(share_text(cell.share), style=style)
    return f"{cell.error:.1e}", used, milliseconds_text(cell.seconds)


def _mass_table(masses: Sequence[AttentionMass]) -> RenderableType:
    table = Table(title="Attention mass: where the softmax lies", **_LOOK)
    table.add_column("layer", no_wrap=True)
    for name in ("window", "selected", "sink", "picks: recall (chance)"):
        table.add_column(name, justify="right")
    for mass in masses:
        recall = "-"
        if mass.recall is not None and mass.chance is not None:
            recall = f"{mass.recall:.0%} ({mass.chance:.0%})"
        shares = (f"{share:.1%}" for share in (mass.window, mass.selected, mass.sink))
        table.add_row(f"{mass.layer} {mass.label}", *shares, recall)
    worst = max((mass.defect for mass in masses), default=0.0)
    text = f"the three shares sum to 1 within {worst:.0e}, worked out from logits and lse"
    return Group(table, _note(text))


def _picks_table(picks: Sequence[Picks]) -> RenderableType:
    table = Table(title="Indexers: recall of the entries that attention weighs most", **_LOOK)
    for name in ("step", "indexers", "as they began", "random"):
        table.add_column(name, justify="right")
    for item in (picks[0], picks[len(picks) // 2], picks[-1]):
        shares = (f"{share:.0%}" for share in (item.recall, item.unlearned, item.chance))
        table.add_row(str(item.step), *shares)
    return table


def _verdict(results: DemoResults) -> RenderableType:
    if results.faults:
        return Group(*(Text(f"failed: {fault}", style="bold red") for fault in results.faults))
    names = dict.fromkeys(cell.backend for cell in results.ran)
    history = results.history
    return Text(
        f"The loss fell from {history.held_out[0].loss:.2f} to {history.held_out[-1].loss:.2f} "
        f"bits per byte; {', '.join(names)} agree{'s' if len(names) == 1 else ''} with the oracle "
        f"on every layer ({len(results.ran)} replays).",
        style="bold green",
    )
