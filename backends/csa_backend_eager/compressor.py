"""``compress_kv`` in PyTorch: forward and backward in bounded memory.

An entry has *slots*: the ``r`` tokens of its block, or, overlapping, first branch a of the block
before and then branch b of its own block. With ``z = gate + bias`` and a channel at a time::

    w     = softmax(z) over the slots          entry = sum w * value
    dvalue = w * grad                          dgate = w * grad * (value - entry)

and dbias sums dgate over entries. All of it in fp32 (fp64 for fp64), each result cast once.
Nothing but the inputs is kept for the backward, and only some entries are in work at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa_dispatch import (
    CompressorCall,
    CompressorCapabilities,
    EntryTable,
    OneOf,
    Operation,
    entry_table,
)

CAPABILITIES = CompressorCapabilities(
    dtype=OneOf(("float64", "float32", "bfloat16", "float16")),
)

WORK = 2**22
"""Slots times channels in work at a time: 16 MiB for each fp32 intermediate."""


class _Part(NamedTuple):
    """Some consecutive entries; ``n`` of them, ``k`` slots each.

    Attributes:
        rows: ``slice`` of the entries.
        tokens: int64 ``[n, k]``, the token of each slot.
        hidden: bool ``[n, k, 1]``, slots that do not exist.
        values: ``[B, n, k, D]`` in the accumulation dtype, 0 where hidden.
        weights: likewise.
    """

    rows: slice
    tokens: Tensor
    hidden: Tensor
    values: Tensor
    weights: Tensor


class EagerCompressor(Operation):
    """Pools on any device, without a sync."""

    forward_capabilities = CAPABILITIES
    backward_capabilities = CAPABILITIES

    def forward(self, call: CompressorCall) -> Tensor:
        values = call.values
        entries = values.new_empty(values.shape[0], call.entries, call.head_dim)
        for part in _parts(call):
            entries[:, part.rows] = (part.weights * part.values).sum(2)
        return entries

    def backward(
        self, call: CompressorCall, *saved: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad_entries, needs = saved
        values, bias = call.values, call.position_bias
        need_values, need_gates, need_bias = needs
        grad_values = values.new_zeros(values.shape) if need_values else None
        grad_gates = values.new_zeros(values.shape) if need_gates else None
        wide = _accumulation_dtype(values.dtype)
        by_slot = bias.new_zeros((call.slots, call.head_dim), dtype=wide)
        for part in _parts(call):
            grad = grad_entries[:, part.rows, None].to(wide)
            # Hidden slots have no gradient, whatever the entry's is.
            of_values = (part.weights * grad).masked_fill_(part.hidden, 0)
            if grad_values is not None:
                _scatter(call, grad_values, part.tokens, of_values)
            if not (need_gates or need_bias):
                continue
            entries = (part.weights * part.values).sum(2, keepdim=True)
            of_gates = of_values.mul_(part.values - entries).masked_fill_(part.hidden, 0)
            if need_bias:
                by_slot += of_gates.sum((0, 1))
            if grad_gates is not None:
                _scatter(call, grad_gates, part.tokens, of_gates)
        grad_bias = _by_channel(call, by_slot).to(bias.dtype) if need_bias else None
        return grad_values, grad_gates, grad_bias


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(call: CompressorCall) -> Iterator[_Part]:
    """The entries some at a time, with their slots gathered and their weights worked out."""
    table, batch = entry_table(call), call.values.shape[0]
    wide = _accumulation_dtype(call.values.dtype)
    bias = _by_slot(call, call.position_bias.to(wide))
    step = max(1, WORK // max(1, batch * bias.numel()))
    for begin in range(0, call.entries, step):
        rows = slice(begin, min(begin + step, call.entries))
        slots, hidden = _slots(call, table, rows)
        values = _gather(call, call.values, slots).to(wide).masked_fill_(hidden, 0)
        gates = _gather(call, call.gates, slots).to(wide) + bias
        # A row without slots must not be NaN; it gets 0 from its values.
        gates.masked_fill_(hidden, -math.inf).masked_fill_(~table.live[rows, None, None], 0)
        yield _Part(rows, slots, hidden, values, gates.softmax(2))


def _slots(call: CompressorCall, table: EntryTable, rows: slice) -> tuple[Tensor, Tensor]:
    """Tokens ``[n, k]`` of the entries' slots and which of them are hidden, ``[n, k, 1]``."""
    position = torch.arange(call.compress_ratio, device=table.first.device)
    own = table.first[rows, None] + position
    hidden = ~table.live[rows, None].expand_as(own)
    if call.overlapping:
        missing = ~table.has_previous[rows, None]
        before = (own - call.compress_ratio).masked_fill(missing, 0)
        own, hidden = torch.cat((before, own), 1), torch.cat((missing.expand_as(own), hidden), 1)
    return own, hidden[..., None]


def _branches(call: CompressorCall, tensor: Tensor) -> list[tuple[slice, Tensor]]:
    """Views of the channels of each branch, with the slots they fill."""
    ratio, size = call.compress_ratio, call.head_dim
    if not call.overlapping:
        return [(slice(ratio), tensor)]
    return [(slice(ratio), tensor[..., :size]), (slice(ratio, None), tensor[..., size:])]


def _gather(call: CompressorCall, tensor: Tensor, tokens: Tensor) -> Tensor:
    """``[B, T, C] -> [B, n, k, D]``, always a copy."""
    found = [
        view.index_select(1, tokens[:, slots].flatten()).unflatten(1, (tokens.shape[0], -1))
        for slots, view in _branches(call, tensor)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def _scatter(call: CompressorCall, total: Tensor, tokens: Tensor, gradient: Tensor) -> None:
    """The transpose of ``_gather``: a token's branch is in one entry alone, or hidden and 0."""
    for slots, view in _branches(call, total):
        part = gradient[:, :, slots].flatten(1, 2).to(total.dtype)
        view.index_add_(1, tokens[:, slots].flatten(), part)


def _by_slot(call: CompressorCall, bias: Tensor) -> Tensor:
    """``[r, C] -> [k, D]``."""
    return torch.cat([view for _, view in _branches(call, bias)])


def _by_channel(call: CompressorCall, by_slot: Tensor) -> Tensor:
    """``[k, D] -> [r, C]``."""
    return torch.cat(by_slot.split(call.compress_ratio), 1)
