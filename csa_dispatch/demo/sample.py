"""Held-out text as the trained model reads it: its surprise, and what it looks back at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .capture import CapturedLayer
from .model import ByteModel


class Letter(NamedTuple):
    """One byte of the text.

    Attributes:
        shown: what stands for it on a page.
        bits: how many bits the model needs for it, given all before it; None for the first.
        seen: how the last byte's query sees it in the layer shown: "window", "picked" or "".
    """

    shown: str
    bits: float | None
    seen: str


class Sample(NamedTuple):
    """A text and the CSA layer whose last query's keys are marked in it.

    Attributes:
        letters: one a byte.
        layer: the layer's number and kind.
        ratio: tokens a picked entry stands for; overlapping pooling reads as many before it too.
    """

    letters: list[Letter]
    layer: str
    ratio: int


def read_sample(model: ByteModel, span: Tensor, layers: Sequence[CapturedLayer]) -> Sample:
    """How ``model`` reads ``span`` ``[T + 1]``, whose first T bytes ``layers`` were captured on.

    The layer shown is the first that picks entries, or the first of all when none does.
    """
    with torch.no_grad():
        text = span.to(next(model.parameters()).device)
        logits, _ = model(text[None, :-1], index_loss=False)
        bits = F.cross_entropy(logits[0], text[1:], reduction="none") / math.log(2)
    layer = next((item for item in layers if item.call.kv_indices is not None), layers[0])
    seen = _seen_by_last_query(layer)
    found = [None, *bits.tolist()]
    letters = [
        Letter(_shown(byte), bit, mark)
        for byte, bit, mark in zip(span.tolist(), found, [*seen, ""], strict=True)
    ]
    return Sample(letters, f"{layer.number} {layer.label}", layer.ratio)


def _seen_by_last_query(layer: CapturedLayer) -> list[str]:
    """Marks of the T bytes that the last of T queries of the first span sees."""
    call = layer.call
    tokens = call.query.shape[2]
    marks = [""] * tokens
    if call.kv_indices is not None:
        for entry in call.kv_indices[0, -1].tolist():
            if entry >= 0:
                first = entry * layer.ratio
                marks[first : first + layer.ratio] = ["picked"] * layer.ratio
    for token in range(max(0, tokens - call.sliding_window_size), tokens):
        marks[token] = "window"
    return marks


def _shown(byte: int) -> str:
    if byte == ord("\n"):
        return "↵\n"
    if byte == ord("\t"):
        return "→   "
    return chr(byte) if 32 <= byte < 127 else "·"
