"""The trained layers' real tensors: each attention call of a held-out batch, with its gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, Kind

from .model import LABELS, ByteModel, bits_per_byte


class CapturedLayer(NamedTuple):
    """One layer's attention call as training would make it, on the CPU.

    Attributes:
        number: the layer, counted from 1.
        ratio: tokens an entry, 0 for a window layer.
        call: query, keys, picks and sink, detached.
        lse: ``[B, H, T]`` that ``attention()`` returned.
        grad_output: ``[B, H, T, D]``, the gradient of the loss that reached the output.
    """

    number: int
    ratio: int
    call: Call
    lse: Tensor
    grad_output: Tensor

    @property
    def label(self) -> str:
        """The layer's kind in V4's terms."""
        return LABELS[self.call.kind]

    @property
    def sizes(self) -> str:
        """The call's sizes in one line."""
        batch, heads, tokens, head_dim = self.call.query.shape
        text = f"B{batch} H{heads} T{tokens} D{head_dim} W{self.call.sliding_window_size}"
        if self.call.sparse_kv is not None:
            text += f" S{self.call.sparse_kv.shape[2]}"
        if self.call.kv_indices is not None:
            text += f" K{self.call.kv_indices.shape[2]}"
        if self.call.kind is Kind.DENSE:
            text += f" r{self.call.compress_ratio}"
        return text


def capture(model: ByteModel, spans: Tensor) -> list[CapturedLayer]:
    """Run ``model`` on held-out ``spans`` ``[B, T + 1]``, forward and backward, and keep all."""
    seen: list[tuple[Call, Tensor, Tensor]] = []

    def see(_: int, call: Call, output: Tensor, lse: Tensor) -> None:
        output.retain_grad()
        seen.append((call, output, lse))

    spans = spans.to(next(model.parameters()).device)
    logits, _ = model(spans[:, :-1], see, index_loss=False)
    (bits_per_byte(logits, spans[:, 1:]).mean() * math.log(2)).backward()
    layers: list[CapturedLayer] = []
    for number, (call, output, lse) in enumerate(seen, start=1):
        assert output.grad is not None
        kept = on_device(call, "cpu")
        ratio = model.config.ratio(call.kind)
        layers.append(CapturedLayer(number, ratio, kept, lse.detach().cpu(), output.grad.cpu()))
    model.zero_grad(set_to_none=True)
    return layers


def on_device(call: Call, device: torch.device | str) -> Call:
    """The call with its tensors detached and on ``device``; strides stay as they are."""
    tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
    return call._replace(**{name: x.detach().to(device) for name, x in tensors.items()})


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The call with query and keys rounded to ``dtype``; the sink stays fp32, as in V4."""
    sparse_kv = None if call.sparse_kv is None else call.sparse_kv.to(dtype)
    return call._replace(
        query=call.query.to(dtype), local_kv=call.local_kv.to(dtype), sparse_kv=sparse_kv
    )


def first_tokens(layer: CapturedLayer, tokens: int) -> CapturedLayer:
    """The layer's call for its first ``tokens`` query rows of the first span alone.

    Attention is causal, so this is a call of its own with the same tensors.
    """
    call, rows = layer.call, slice(0, tokens)
    cut = call._replace(
        query=call.query[:1, :, rows],
        local_kv=call.local_kv[:1, :, rows],
        sparse_kv=None if call.sparse_kv is None else call.sparse_kv[:1],
        kv_indices=None if call.kv_indices is None else call.kv_indices[:1, rows],
    )
    return layer._replace(
        call=cut, lse=layer.lse[:1, :, rows], grad_output=layer.grad_output[:1, :, rows]
    )
