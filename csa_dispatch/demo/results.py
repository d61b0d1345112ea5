"""Everything one demo found, for the terminal, the report and JSON alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from csa_dispatch.testing import TensorVerdict

from .capture import CapturedLayer
from .corpus import Corpus
from .mass import AttentionMass
from .model import parameter_count
from .replay import Cell, Explained
from .sample import Sample
from .train import History, TrainConfig


class DemoResults(NamedTuple):
    """What was trained, what ran, and whether all of it holds.

    Attributes:
        seconds: how long training took, measurements included.
        environment: versions and device, from ``csa_dispatch.parity.environment``.
    """

    config: TrainConfig
    corpus: Corpus
    history: History
    seconds: float
    layers: list[CapturedLayer]
    explained: list[Explained]
    cells: list[Cell]
    masses: list[AttentionMass]
    sample: Sample
    environment: dict[str, object]

    @property
    def failed(self) -> list[Cell]:
        """Cells whose result is not within the error budget, or that raised."""
        return [cell for cell in self.cells if cell.status == "fail"]

    @property
    def ran(self) -> list[Cell]:
        """Cells that ran, whatever came of them."""
        return [cell for cell in self.cells if cell.status != "refused"]

    @property
    def faults(self) -> list[str]:
        """What went wrong, one line each; empty when the demo holds."""
        history = self.history
        found = []
        if not history.fell:
            found.append(
                f"the held-out loss did not fall: {history.held_out[0].loss:.3f} to "
                f"{history.held_out[-1].loss:.3f} bits per byte, improvement "
                f"{history.improvement:.3f} with a standard error of {history.uncertainty:.3f}"
            )
        if not self.ran:
            found.append("no backend ran the replay")
        for cell in self.failed:
            found.append(
                f"layer {cell.layer} ({cell.label}) on {cell.backend}, {cell.device}, "
                f"{cell.dtype}: {cell.message}"
            )
        return found

    @property
    def dtypes(self) -> list[str]:
        """The dtypes replayed, in order."""
        return list(dict.fromkeys(cell.dtype for cell in self.cells))

    def by_row(self) -> list[dict[str, Cell]]:
        """What ran, as rows: dtype to cell for one layer, backend and device."""
        rows: dict[tuple[int, str, str], dict[str, Cell]] = {}
        for cell in self.ran:
            rows.setdefault((cell.layer, cell.backend, cell.device), {})[cell.dtype] = cell
        return list(rows.values())

    def notes(self) -> list[str]:
        """What the parity table leaves out, one line each: slices, and refusals with Reasons.

        Of a backend that is not installed only that is said.
        """
        sliced = next((cell for cell in self.ran if cell.sliced), None)
        lines: dict[str, list[int]] = {}
        if sliced is not None:
            text = f"interpreted, so slow: the first {sliced.tokens} rows of each layer"
            lines[f"* {text} of {self.config.tokens}"] = []
        for cell in self.cells:
            absent = [reason for reason in cell.reasons if reason.field == "availability"]
            for reason in absent or cell.reasons:
                text = f"not replayed: {cell.backend} on {cell.device}: {reason}"
                layers = lines.setdefault(text, [])
                if cell.layer not in layers:
                    layers.append(cell.layer)
        return [about(text, layers, len(self.layers)) for text, layers in lines.items()]

    def to_dict(self) -> dict[str, object]:
        """All of it as JSON-ready data, without the tensors."""
        history, corpus, config = self.history, self.corpus, self.config
        return {
            "ok": not self.faults,
            "faults": self.faults,
            "corpus": {
                "root": str(corpus.root),
                "digest": corpus.digest,
                "train_files": corpus.train.files,
                "train_bytes": corpus.train.size,
                "held_out_files": corpus.held_out.files,
                "held_out_bytes": corpus.held_out.size,
            },
            "training": {
                "steps": config.steps,
                "batch": config.batch,
                "tokens": config.tokens,
                "seed": config.seed,
                "device": config.device,
                "parameters": parameter_count(config.model),
                "seconds": self.seconds,
                "loss": [item._asdict() for item in history.steps],
                "held_out": [item._asdict() for item in history.held_out],
                "picks": [item._asdict() for item in history.picks],
                "baselines": history.baselines._asdict(),
                "improvement": history.improvement,
                "uncertainty": history.uncertainty,
                "ran": [
                    {"direction": direction, "kind": kind, "backend": backend, "count": count}
                    for (direction, kind, backend), count in history.ran.items()
                ],
            },
            "explain": [
                {
                    **item._asdict(),
                    "layers": list(item.layers),
                    "decision": item.decision.to_dict(),
                }
                for item in self.explained
            ],
            "parity": [_cell_data(cell) for cell in self.cells],
            "attention_mass": [
                {**mass._asdict(), "sink_by_head": list(mass.sink_by_head)} for mass in self.masses
            ],
            "sample": {
                **self.sample._asdict(),
                "letters": [tuple(x) for x in self.sample.letters],
            },
            "environment": self.environment,
        }


def about(text: str, layers: Sequence[object], every: int) -> str:
    """A note with the layers it is about, unless that is none or all of ``every``."""
    where = f"layers {', '.join(map(str, layers))}: " if 0 < len(layers) < every else ""
    return where + text


def milliseconds_text(seconds: float | None) -> str:
    """A time in ms to two or three figures; nothing for None."""
    if seconds is None:
        return ""
    time = seconds * 1e3
    return f"{time:.0f}" if time >= 10 else f"{time:.1f}"


def _cell_data(cell: Cell) -> dict[str, object]:
    return {
        **cell._asdict(),
        "share": _finite(cell.share),
        "error": _finite(cell.error),
        "verdicts": [_verdict_data(verdict) for verdict in cell.verdicts],
        "reasons": [reason._asdict() for reason in cell.reasons],
    }


def _verdict_data(verdict: TensorVerdict) -> dict[str, object]:
    numbers = {"share": _finite(verdict.share), "error": _finite(verdict.error)}
    return {**verdict._asdict(), **numbers}


def _finite(value: float) -> float | None:
    """JSON has no infinity, which is the share of a result wrong in shape or NaN: null."""
    return value if math.isfinite(value) else None
