"""Everything one demo found, for the terminal, the report and JSON alike."""

from __future__ import annotations

from typing import NamedTuple

from .capture import CapturedLayer
from .corpus import Corpus
from .mass import AttentionMass
from .replay import Cell, Explained
from .train import History, TrainConfig


class DemoResults(NamedTuple):
    """What was trained, what ran, and whether all of it holds.

    Attributes:
        parameters: weights of the model.
        seconds: how long training took, measurements included.
        environment: versions and device, from ``csa_dispatch.parity.environment``.
    """

    config: TrainConfig
    corpus: Corpus
    parameters: int
    history: History
    seconds: float
    layers: list[CapturedLayer]
    explained: list[Explained]
    cells: list[Cell]
    masses: list[AttentionMass]
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

    def refusals(self) -> dict[tuple[str, str], dict[str, list[int]]]:
        """(backend, device) to its Reasons to the layers that have them, once for all dtypes."""
        found: dict[tuple[str, str], dict[str, list[int]]] = {}
        for cell in self.cells:
            for reason in cell.reasons:
                layers = found.setdefault((cell.backend, cell.device), {})
                numbers = layers.setdefault(str(reason), [])
                if cell.layer not in numbers:
                    numbers.append(cell.layer)
        return found

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
                "parameters": self.parameters,
                "seconds": self.seconds,
                "loss": [item._asdict() for item in history.steps],
                "held_out": [item._asdict() for item in history.held_out],
                "baselines": history.baselines._asdict(),
                "improvement": history.improvement,
                "uncertainty": history.uncertainty,
                "ran": [
                    {"direction": direction, "kind": kind, "backend": backend, "count": count}
                    for (direction, kind, backend), count in history.ran.items()
                ],
            },
            "explain": [
                {**item._asdict(), "layers": list(item.layers), "decision": item.decision.to_dict()}
                for item in self.explained
            ],
            "parity": [_cell_data(cell) for cell in self.cells],
            "attention_mass": [
                {**mass._asdict(), "sink_by_head": list(mass.sink_by_head)} for mass in self.masses
            ],
            "environment": self.environment,
        }


def _cell_data(cell: Cell) -> dict[str, object]:
    return {
        **cell._asdict(),
        "share": cell.share,
        "error": cell.error,
        "verdicts": [verdict._asdict() for verdict in cell.verdicts],
        "reasons": [reason._asdict() for reason in cell.reasons],
    }
