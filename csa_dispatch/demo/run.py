"""The whole demo: train, capture, replay, measure."""

from __future__ import annotations

import time

import torch
from rich.console import Console

from csa_dispatch import backends
from csa_dispatch.parity.environment import environment

from . import console as screen
from .capture import capture
from .corpus import load_corpus
from .mass import attention_mass
from .replay import cell_count, explain_layers, replay
from .results import DemoResults
from .sample import read_sample
from .train import TrainConfig, train

REPLAYED_SPANS = 1
"""Held-out spans replayed: the oracle works row by row, and a span has hundreds."""

MEASURED_SPANS = 8
"""Held-out spans whose attention mass is measured."""


def run_demo(config: TrainConfig, console: Console) -> DemoResults:
    """Train on the standard library's sources, then replay the layers on every backend.

    Raises:
        CorpusError: the standard library is not there as source files.
        BackendRefused: a forced backend cannot run the model's layers.
    """
    corpus = load_corpus()
    console.print(screen.introduction(config, corpus), highlight=False)
    started = time.perf_counter()
    with screen.training(console, config) as progress:
        trained = train(config, corpus, progress)
    seconds = time.perf_counter() - started

    spans = trained.held_out
    layers = capture(trained.model, spans[:REPLAYED_SPANS])
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    with screen.replaying(console, cell_count(layers, devices)) as show:
        cells = replay(layers, devices, on_cell=show)
    return DemoResults(
        config=config,
        corpus=corpus,
        history=trained.history,
        seconds=seconds,
        layers=layers,
        explained=explain_layers(layers, config.device),
        cells=cells,
        masses=[attention_mass(item) for item in capture(trained.model, spans[:MEASURED_SPANS])],
        sample=read_sample(trained.model, spans[0], layers),
        environment=environment(config.device, list(backends())),
    )
