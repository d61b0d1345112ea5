"""Training: AdamW, a warm-up and a cosine, and a held-out loss that has to fall."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import CallSpec, record_receipts

from .corpus import Baselines, Corpus, baselines, draw_spans
from .model import ByteModel, ModelConfig, bits_per_byte
from .picks import Picks, indexer_weights, measure_picks

NOISE = 3.0
"""Standard errors of the mean improvement that a fall of the held-out loss must exceed."""


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, on how much, and how it is measured.

    Attributes:
        steps: optimiser steps.
        batch, tokens: spans a step and bytes a span.
        held_out_spans: spans the held-out loss is a mean over; they are the same every time.
        evaluations: how often the held-out loss is measured during training, besides the start.
        teach_indexers: train the indexers by their loss; else they stay what they began as.
        seed: of the weights and of every span drawn.
        device: ``"cpu"`` or ``"cuda"``.
    """

    steps: int = 100
    batch: int = 8
    tokens: int = 256
    held_out_spans: int = 32
    evaluations: int = 10
    learning_rate: float = 1e-2
    weight_decay: float = 0.05
    warm_up: int = 20
    clip: float = 1.0
    teach_indexers: bool = True
    seed: int = 0
    device: str = "cpu"
    model: ModelConfig = field(default_factory=ModelConfig)

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine to a twentieth."""
        warm_up = min(self.warm_up, max(1, self.steps // 4))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def measures(self, step: int) -> bool:
        """Whether the held-out loss is measured after ``step`` steps."""
        every = max(1, self.steps // self.evaluations)
        return step % every == 0 or step == self.steps


class StepLoss(NamedTuple):
    """Training loss of one step, bits per byte, and the indexers' KL in nats."""

    step: int
    loss: float
    index_loss: float


class HeldOutLoss(NamedTuple):
    """Held-out loss after so many steps, bits per byte."""

    step: int
    loss: float


class History(NamedTuple):
    """How training went.

    Attributes:
        steps: every training step.
        held_out: every measurement, the first before any training.
        picks: the indexers' picks at every measurement; empty when no token has to choose.
        baselines: what counts of bytes and pairs reach on the same held-out spans.
        improvement: mean over held-out spans of the fall from first to last, bits per byte.
        uncertainty: standard error of that mean.
        ran: how often each backend ran each kind: (direction, kind, backend) to a count.
    """

    steps: list[StepLoss]
    held_out: list[HeldOutLoss]
    picks: list[Picks]
    baselines: Baselines
    improvement: float
    uncertainty: float
    ran: dict[tuple[str, str, str], int]

    @property
    def fell(self) -> bool:
        """Whether the held-out loss fell by more than the noise between spans."""
        return self.improvement > NOISE * self.uncertainty


class Trained(NamedTuple):
    """A trained model, its history, and the held-out spans ``[N, tokens + 1]``."""

    model: ByteModel
    history: History
    held_out: Tensor


class Progress(NamedTuple):
    """What a reader is told while training runs."""

    on_step: Callable[[StepLoss], None]
    on_held_out: Callable[[HeldOutLoss], None]


SILENT = Progress(lambda _: None, lambda _: None)


def train(config: TrainConfig, corpus: Corpus, progress: Progress = SILENT) -> Trained:
    """Train a model from scratch.

    The same config, corpus, torch build and thread count give the same numbers on a CPU; torch's
    global random state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = ByteModel(config.model).to(config.device)
    draws = torch.Generator().manual_seed(config.seed)
    # Its own generator: how many steps are trained must not change what is held out.
    held_out_draws = torch.Generator().manual_seed(config.seed + 1)
    held_out = draw_spans(
        corpus.held_out, config.held_out_spans, config.tokens + 1, held_out_draws
    )
    spans_on_device = held_out.to(config.device)
    optimizer = _optimizer(model, config)

    steps: list[StepLoss] = []
    measured: list[HeldOutLoss] = []
    picks: list[Picks | None] = []
    initial = indexer_weights(model)

    def measure(step: int) -> Tensor:
        losses = held_out_losses(model, spans_on_device, config.batch)
        picks.append(measure_picks(model, initial, spans_on_device, step))
        measured.append(HeldOutLoss(step, float(losses.mean())))
        progress.on_held_out(measured[-1])
        return losses

    with record_receipts() as receipts:
        first = last = measure(0)
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            spans = draw_spans(corpus.train, config.batch, config.tokens + 1, draws)
            steps.append(_step(model, optimizer, spans.to(config.device), config, step + 1))
            progress.on_step(steps[-1])
            if config.measures(step + 1):
                last = measure(step + 1)
    fall = first - last
    ran = Counter(
        (item.direction, item.spec.kind.value, item.backend)
        for item in receipts
        if isinstance(item.spec, CallSpec)
    )
    history = History(
        steps,
        measured,
        [item for item in picks if item is not None],
        baselines(corpus.train, held_out),
        float(fall.mean()),
        float(fall.std() / math.sqrt(fall.numel())),
        dict(ran),
    )
    return Trained(model, history, held_out)


def _optimizer(model: ByteModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def _step(
    model: ByteModel,
    optimizer: torch.optim.Optimizer,
    spans: Tensor,
    config: TrainConfig,
    number: int,
) -> StepLoss:
    logits, index_loss = model(spans[:, :-1])
    loss = bits_per_byte(logits, spans[:, 1:]).mean()
    optimizer.zero_grad(set_to_none=True)
    total = loss * math.log(2)
    (total + index_loss if config.teach_indexers else total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return StepLoss(number, loss.item(), index_loss.item())


@torch.no_grad()
def held_out_losses(model: ByteModel, spans: Tensor, batch: int) -> Tensor:
    """Bits per byte of each span: ``[N]`` on the CPU."""
    losses = []
    for part in spans.split(batch):
        logits, _ = model(part[:, :-1], index_loss=False)
        losses.append(bits_per_byte(logits, part[:, 1:]))
    return torch.cat(losses).cpu()
