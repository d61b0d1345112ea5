"""The pooling of ``compress_kv`` in PyTorch: forward and backward in bounded memory.

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
from typing import NamedTuple

import torch
from torch import Tensor

from .entry_table import EntryTable, entry_table

WORK = 2**22
"""Slots times channels in work at a time: 16 MiB for each fp32 intermediate."""


class Pooling(NamedTuple):
    """One pooling: ``compress_kv``'s validated arguments.

    Attributes:
        values, gates: ``[B, T, C]`` of one dtype, any strides.
        position_bias: ``[r, C]`` in that dtype or fp32.
        compress_ratio: r, tokens a block.
        overlapping: whether ``C = 2 D`` holds the two branches.
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` offsets of packed documents, or None.
    """

    values: Tensor
    gates: Tensor
    position_bias: Tensor
    compress_ratio: int
    overlapping: bool
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None

    @property
    def head_dim(self) -> int:
        """Channels of an entry, D."""
        channels = self.values.shape[-1]
        return channels // 2 if self.overlapping else channels

    @property
    def entries(self) -> int:
        """Rows of the result: ``T // r``, spare ones included."""
        return self.values.shape[1] // self.compress_ratio


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


def pool_forward(pooling: Pooling) -> Tensor:
    """Entries ``[B, T // r, D]`` in the values' dtype; spare rows are 0."""
    values = pooling.values
    entries = values.new_empty(values.shape[0], pooling.entries, pooling.head_dim)
    for part in _parts(pooling):
        entries[:, part.rows] = (part.weights * part.values).sum(2)
    return entries


def pool_backward(
    pooling: Pooling, grad_entries: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of values, gates and position_bias, those that ``needs`` asks for."""
    values, gates, bias = pooling.values, pooling.gates, pooling.position_bias
    need_values, need_gates, need_bias = needs
    grad_values = torch.zeros_like(values) if need_values else None
    grad_gates = torch.zeros_like(gates) if need_gates else None
    wide = _accumulation_dtype(values.dtype)
    slots = pooling.compress_ratio * (2 if pooling.overlapping else 1)
    by_slot = bias.new_zeros((slots, pooling.head_dim), dtype=wide)
    for part in _parts(pooling):
        grad = grad_entries[:, part.rows, None].to(wide)
        # Hidden slots have no gradient, whatever the entry's is.
        of_values = (part.weights * grad).masked_fill_(part.hidden, 0)
        if grad_values is not None:
            _scatter(pooling, grad_values, part.tokens, of_values)
        if not (need_gates or need_bias):
            continue
        entries = (part.weights * part.values).sum(2, keepdim=True)
        of_gates = of_values.mul_(part.values - entries).masked_fill_(part.hidden, 0)
        by_slot += of_gates.sum((0, 1))
        if grad_gates is not None:
            _scatter(pooling, grad_gates, part.tokens, of_gates)
    grad_bias = _by_channel(pooling, by_slot).to(bias.dtype) if need_bias else None
    return grad_values, grad_gates, grad_bias


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(pooling: Pooling) -> Iterator[_Part]:
    """The entries some at a time, with their slots gathered and their weights worked out."""
    batch, tokens, _ = pooling.values.shape
    ratio, device = pooling.compress_ratio, pooling.values.device
    table = entry_table(tokens, ratio, pooling.cu_seqlens, pooling.cu_seqlens_k, device)
    wide = _accumulation_dtype(pooling.values.dtype)
    bias = _by_slot(pooling, pooling.position_bias.to(wide))
    step = max(1, WORK // max(1, batch * bias.numel()))
    for begin in range(0, pooling.entries, step):
        rows = slice(begin, min(begin + step, pooling.entries))
        slots, hidden = _slots(table, rows, ratio, pooling.overlapping)
        values = _gather(pooling, pooling.values, slots).to(wide).masked_fill_(hidden, 0)
        gates = _gather(pooling, pooling.gates, slots).to(wide) + bias
        # A row without slots must not be NaN; it gets 0 from its values.
        gates.masked_fill_(hidden, -math.inf).masked_fill_(~table.live[rows, None, None], 0)
        yield _Part(rows, slots, hidden, values, gates.softmax(2))


def _slots(table: EntryTable, rows: slice, ratio: int, overlapping: bool) -> tuple[Tensor, Tensor]:
    """Tokens ``[n, k]`` of the entries' slots and which of them are hidden, ``[n, k, 1]``."""
    position = torch.arange(ratio, device=table.first.device)
    own = table.first[rows, None] + position
    hidden = ~table.live[rows, None].expand_as(own)
    if overlapping:
        missing = ~table.has_previous[rows, None]
        before = (own - ratio).masked_fill(missing, 0)
        own, hidden = torch.cat((before, own), 1), torch.cat((missing.expand_as(own), hidden), 1)
    return own, hidden[..., None]


def _branches(pooling: Pooling, tensor: Tensor) -> list[tuple[slice, Tensor]]:
    """Views of the channels of each branch, with the slots they fill."""
    ratio, size = pooling.compress_ratio, pooling.head_dim
    if not pooling.overlapping:
        return [(slice(ratio), tensor)]
    return [(slice(ratio), tensor[..., :size]), (slice(ratio, None), tensor[..., size:])]


def _gather(pooling: Pooling, tensor: Tensor, tokens: Tensor) -> Tensor:
    """``[B, T, C] -> [B, n, k, D]``, always a copy."""
    found = [
        view.index_select(1, tokens[:, slots].flatten()).unflatten(1, (tokens.shape[0], -1))
        for slots, view in _branches(pooling, tensor)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def _scatter(pooling: Pooling, total: Tensor, tokens: Tensor, gradient: Tensor) -> None:
    """The transpose of ``_gather``: a token's branch is in one entry alone, or hidden and 0."""
    for slots, view in _branches(pooling, total):
        part = gradient[:, :, slots].flatten(1, 2).to(total.dtype)
        view.index_add_(1, tokens[:, slots].flatten(), part)


def _by_slot(pooling: Pooling, bias: Tensor) -> Tensor:
    """``[r, C] -> [k, D]``."""
    return torch.cat([view for _, view in _branches(pooling, bias)])


def _by_channel(pooling: Pooling, by_slot: Tensor) -> Tensor:
    """``[k, D] -> [r, C]``."""
    return torch.cat(by_slot.split(pooling.compress_ratio), 1)
