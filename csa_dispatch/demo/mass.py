"""Where attention goes: how much of each row's softmax lies in window, selection and sink."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, Kind

from .capture import CapturedLayer
from .picks import complete, entry_attention

ROWS = 64
"""Query rows sampled of every span."""


class AttentionMass(NamedTuple):
    """Shares of the softmax in one layer, means over sampled rows and heads; they sum to 1.

    Attributes:
        layer: its number, from 1.
        label: window, CSA or HCA.
        window, selected, sink: the shares.
        sink_by_head: ``[H]`` the sink's share in each head.
        defect: largest ``|window + selected + sink - 1|`` of a row and head: how far the lse
            that ``attention()`` returned is from the logits worked out again in float64.
        recall: CSA only: attention to the indexer's picks over attention to the best picks
            there are, mean over rows that have to choose.
        chance: what random picks would reach.
    """

    layer: int
    label: str
    window: float
    selected: float
    sink: float
    sink_by_head: tuple[float, ...]
    defect: float
    recall: float | None
    chance: float | None


def attention_mass(layer: CapturedLayer, rows: int = ROWS) -> AttentionMass:
    """Shares of the softmax, exactly: ``exp(logit - lse)`` summed over each kind of key.

    Logits are worked out in float64 from the layer's tensors; lse is the one that ``attention()``
    returned. Rows are evenly spaced, so that short and long contexts count alike.
    """
    call = layer.call
    tokens = call.query.shape[2]
    sampled = torch.linspace(0, tokens - 1, min(rows, tokens)).round().long()
    query = call.query[:, :, sampled].double()
    lse = layer.lse[:, :, sampled].double()
    assert call.attention_sink is not None
    window = _window_share(call, query, lse, sampled)
    selected = _selected_share(call, query, lse, sampled)
    sink = torch.exp(call.attention_sink.double()[None, :, None] - lse)
    defect = (window + selected + sink - 1).abs().max()
    recall, chance = _recall(layer) if call.kind is Kind.GATHER else (None, None)
    return AttentionMass(
        layer.number,
        layer.label,
        float(window.mean()),
        float(selected.mean()),
        float(sink.mean()),
        tuple(sink.mean(dim=(0, 2)).tolist()),
        float(defect),
        recall,
        chance,
    )


def _window_share(call: Call, query: Tensor, lse: Tensor, sampled: Tensor) -> Tensor:
    """``[B, H, N]`` for the sampled rows; the model has one KV head."""
    row = sampled[:, None] - torch.arange(call.sliding_window_size)
    keys = call.local_kv[:, 0, row.clamp(min=0)].double()
    logits = call.scale * torch.einsum("bhnd,bnwd->bhnw", query, keys)
    return _share(logits, lse, row >= 0)


def _selected_share(call: Call, query: Tensor, lse: Tensor, sampled: Tensor) -> Tensor:
    if call.sparse_kv is None:
        return torch.zeros_like(lse)
    logits = call.scale * query @ call.sparse_kv.double().mT
    if call.kv_indices is None:
        assert call.compress_ratio is not None
        return _share(logits, lse, complete(sampled, logits.shape[-1], call.compress_ratio))
    slots = call.kv_indices[:, sampled].long()[:, None]
    picked = logits.gather(3, slots.clamp(min=0).expand(-1, logits.shape[1], -1, -1))
    return _share(picked, lse, slots >= 0)


def _share(logits: Tensor, lse: Tensor, used: Tensor) -> Tensor:
    return torch.exp(logits - lse[..., None]).masked_fill(~used, 0.0).sum(dim=-1)


def _recall(layer: CapturedLayer) -> tuple[float, float]:
    """How good the indexer's picks are, and how good random ones would be."""
    call = layer.call
    assert call.sparse_kv is not None
    assert call.kv_indices is not None
    entries, slots = call.sparse_kv.shape[2], call.kv_indices.shape[2]
    tokens = torch.arange(call.query.shape[2])
    visible = complete(tokens, entries, layer.ratio)
    choosing = visible.sum(1) > slots
    drawn = entry_attention(call, layer.lse).masked_fill(~visible, -torch.inf)
    drawn = drawn[:, choosing].softmax(dim=-1)
    picks = call.kv_indices[:, choosing].long()
    best = drawn.topk(slots, dim=-1).values.sum(-1)
    recall = drawn.gather(2, picks).sum(-1) / best
    chance = slots / visible[choosing].sum(1) / best
    return float(recall.mean()), float(chance.mean())
