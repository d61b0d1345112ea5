"""Which entries the indexers pick while the model learns, and whether they are the right ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call

from .model import ByteModel

SPANS = 4
"""Held-out spans that picks are measured on."""


class Picks(NamedTuple):
    """The indexers' picks after so many steps.

    Recall is the share of the entries that attention itself would weigh most which are among the
    picks; a mean over CSA layers and over the tokens that have to choose.

    Attributes:
        step: optimiser steps so far.
        recall: of the indexers.
        unlearned: of the same model with the indexers it began with.
        chance: of random picks.
        shown: entries that the last token of the first span picks in the first CSA layer.
        wanted: those that attention would weigh most there.
        entries: how many there are to pick from.
    """

    step: int
    recall: float
    unlearned: float
    chance: float
    shown: tuple[int, ...]
    wanted: tuple[int, ...]
    entries: int


class _Layer(NamedTuple):
    call: Call
    lse: Tensor


def complete(tokens: Tensor, entries: int, ratio: int) -> Tensor:
    """Bool ``[T, S]``: entry i is complete at token t, ``i < (t + 1) // ratio``."""
    return torch.arange(entries, device=tokens.device) < ((tokens + 1) // ratio)[:, None]


def entry_attention(call: Call, lse: Tensor) -> Tensor:
    """Log attention each entry would draw, all heads together: ``[B, T, S]``, no gradient.

    ``log sum_h exp(scale * <query_h, entry> - lse_h)`` over every entry, picked or not.
    """
    assert call.sparse_kv is not None
    with torch.no_grad():
        logits = call.scale * call.query @ call.sparse_kv.mT
        return (logits - lse[..., None]).logsumexp(dim=1)


def indexer_weights(model: ByteModel) -> dict[str, Tensor]:
    """A copy of every weight of the model's indexers, by name."""
    return {
        name: weight.detach().clone()
        for name, weight in model.named_parameters()
        if ".indexer." in name
    }


def measure_picks(
    model: ByteModel, initial: Mapping[str, Tensor], spans: Tensor, step: int
) -> Picks | None:
    """Picks on ``spans`` ``[N, T + 1]``; None when no token of the model has to choose.

    Args:
        initial: the indexers' weights before training, for comparison.
    """
    layers = _csa_layers(model, spans[:SPANS, :-1])
    ratio = model.config.csa_ratio
    if not layers or (spans.shape[1] - 1) // ratio <= model.config.top_k:
        return None
    found = [recall_of(layer.call, layer.lse, ratio) for layer in layers]
    with _indexers(model, initial):
        before = [
            recall_of(layer.call, layer.lse, ratio)[0]
            for layer in _csa_layers(model, spans[:SPANS, :-1])
        ]
    first = layers[0]
    drawn, slots = _ranked(first.call, first.lse, ratio)
    assert first.call.kv_indices is not None
    return Picks(
        step,
        sum(recall for recall, _ in found) / len(found),
        sum(before) / len(before),
        sum(chance for _, chance in found) / len(found),
        tuple(sorted(first.call.kv_indices[0, -1].tolist())),
        tuple(sorted(drawn[0, -1].topk(slots).indices.tolist())),
        (spans.shape[1] - 1) // ratio,
    )


def recall_of(call: Call, lse: Tensor, ratio: int) -> tuple[float, float]:
    """Recall of a CSA layer's picks, and what random ones would reach."""
    assert call.kv_indices is not None
    drawn, slots = _ranked(call, lse, ratio)
    visible = (drawn > -torch.inf).sum(-1)
    choosing = visible > slots
    best = drawn.topk(slots, dim=-1).indices[choosing]
    picks = call.kv_indices[choosing]
    hits = (picks[:, :, None] == best[:, None]).any(-1)
    chance = slots / visible[choosing]
    return float(hits.float().mean()), float(chance.mean())


def _ranked(call: Call, lse: Tensor, ratio: int) -> tuple[Tensor, int]:
    """``entry_attention`` with -inf for the future, and the number of slots."""
    assert call.kv_indices is not None
    drawn = entry_attention(call, lse)
    tokens = torch.arange(drawn.shape[1], device=drawn.device)
    hidden = ~complete(tokens, drawn.shape[2], ratio)
    return drawn.masked_fill(hidden, -torch.inf), call.kv_indices.shape[2]


@torch.no_grad()
def _csa_layers(model: ByteModel, text: Tensor) -> list[_Layer]:
    found: list[_Layer] = []

    def see(_number: int, call: Call, _output: Tensor, lse: Tensor) -> None:
        if call.kv_indices is not None:
            found.append(_Layer(call, lse))

    model(text, see, index_loss=False)
    return found


@contextmanager
def _indexers(model: ByteModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Lend the model's indexers other weights."""
    learned = indexer_weights(model)
    model.load_state_dict(weights, strict=False)
    try:
        yield
    finally:
        model.load_state_dict(learned, strict=False)
