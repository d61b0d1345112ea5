"""Slots: a call as kernels want it that gather their keys by index, one table of rows for all.

The table is ``[local_kv; sparse_kv]`` of a batch entry. Each token has a row of slots, numbers of
table rows: its window's, then its pool's, then padding; -1 is unused. So windows, documents and
dense pools are a matter of which slots are used, and one kernel runs every kind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call, Kind, TokenBounds
from .call_spec import CallSpec
from .reasons import Reason

SLOT_BLOCK = 128
"""Rows of slots are padded to blocks of this many, the steps that such kernels take."""

DENSE_SLOTS_LIMIT = 2048
"""Widest row of slots for kinds that need no index.

It is the width the kernels are tuned for (DeepSeek's top-k). Beyond it most of a causal pool's
slots are unused yet walked, and the slots themselves (4 bytes each) outgrow the KV.
"""


class SlotLayout(NamedTuple):
    """Where a call's rows lie in the table, and its slots in a token's row of slots.

    Attributes:
        local_rows: rows of the table that are ``local_kv``'s, first; 0 when no window reads them.
        pool_rows: rows that are ``sparse_kv``'s, after them.
        window: slots of the window, first.
        pool: slots of the pool, after them.
    """

    local_rows: int
    pool_rows: int
    window: int
    pool: int

    @property
    def width(self) -> int:
        """Slots with padding: whole blocks, one at least."""
        return max(1, -(-(self.window + self.pool) // SLOT_BLOCK)) * SLOT_BLOCK


def slot_layout(call: Call | CallSpec) -> SlotLayout:
    """The layout of a call or of one described, from its sizes alone."""
    if isinstance(call, CallSpec):
        tokens, window, rows, slots = call.tokens, call.window, call.pool, call.slots
        packed = call.documents == "cu_seqlens"
    else:
        tokens, window = call.query.shape[2], call.sliding_window_size
        rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
        slots = 0 if call.kv_indices is None else call.kv_indices.shape[2]
        packed = call.cu_seqlens is not None
    if call.kind is Kind.WINDOW:
        rows = slots = 0
    elif call.kind is Kind.DENSE:
        # The entries complete at the last token. A packed document may have begun before row 0:
        # its tokens see more than the rows tell.
        slots = rows if packed else min(rows, tokens // (call.compress_ratio or 1))
    # No token sees more rows than there are.
    return SlotLayout(tokens if window else 0, rows, min(window, tokens), slots)


def slot_rows(call: Call, layout: SlotLayout, bounds: TokenBounds | None) -> Tensor:
    """Every token's slots, int32 ``[B, T, width]``, by PyTorch operators without a sync.

    Args:
        layout: ``slot_layout(call)``.
        bounds: ``token_bounds(call)``.
    """
    batch, _, tokens, _ = call.query.shape
    window, pool, device = layout.window, layout.pool, call.query.device
    slots = torch.full((batch, tokens, layout.width), -1, dtype=torch.int32, device=device)
    slots[..., :window] = _window_rows(tokens, window, bounds, device)
    if pool:
        slots[..., window : window + pool] = _pool_rows(call, layout, bounds)
    return slots


def _window_rows(
    tokens: int, window: int, bounds: TokenBounds | None, device: torch.device
) -> Tensor:
    """int32 ``[B or 1, T, window]``: the last ``window`` rows up to the token's own."""
    token = torch.arange(tokens, device=device, dtype=torch.int32)[:, None]
    back = torch.arange(window - 1, -1, -1, device=device, dtype=torch.int32)
    row = (token - back)[None]
    first = 0 if bounds is None else bounds.window_start[..., None]
    return torch.where((row >= first) & (row >= 0), row, -1)


def _pool_rows(call: Call, layout: SlotLayout, bounds: TokenBounds | None) -> Tensor:
    """``[B, T, pool]``: the selected rows, or the first visible ones of a dense pool."""
    start: Tensor | int = 0
    length: Tensor | int = layout.pool_rows
    if bounds is not None:
        assert bounds.pool_start is not None
        assert bounds.pool_end is not None
        start = bounds.pool_start[..., None]
        length = (bounds.pool_end - bounds.pool_start)[..., None]
    if call.kind is Kind.GATHER:
        assert call.kv_indices is not None
        slot = call.kv_indices
    else:
        slot = torch.arange(layout.pool, device=call.query.device, dtype=torch.int32)
    # Compared in the caller's width: an int64 slot need not fit 32 bits.
    used = (slot >= 0) & (slot < length)
    return torch.where(used, slot + (start + layout.local_rows), -1)


def dense_slots_bounded(spec: CallSpec) -> Reason | None:
    """Window and dense-compressed kinds run through indices: at most 2048 rows a token."""
    layout = slot_layout(spec)
    slots = layout.window + layout.pool
    if spec.kind is Kind.GATHER or slots <= DENSE_SLOTS_LIMIT:
        return None
    actual = f"{slots} rows a token"
    needed = f"at most {DENSE_SLOTS_LIMIT} for the {spec.kind.value} kind"
    return Reason("dense_slots_bounded", actual, needed, "use triton or eager")
