"""What cuDNN reads: KV rows of all batch entries in one table, and int32 slots into it.

The table is [local; sparse] of the first batch entry, then of the next. Slots are absolute row
numbers, so batch entries and documents are a matter of which slots are used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, Kind, TokenBounds, token_bounds
from csa_dispatch.call_spec import stride_class

from .slots import padded, pool_slots, window_slots


class Operands(NamedTuple):
    """The KV and the slots of a call.

    Attributes:
        table: ``[B * N, D]``.
        indices: int32 ``[B * T, width]``: the window's slots, the pool's, padding; -1 is unused.
        lengths: int32 ``[B * T]``: the slots of a token up to its last used one.
        local_rows: rows of a batch entry that are ``local_kv``'s; 0 when no window reads them.
    """

    table: Tensor
    indices: Tensor
    lengths: Tensor
    local_rows: int


def build_operands(call: Call) -> Operands:
    """Table and slots of a call, on its device and without waiting for it."""
    batch, _, tokens, _ = call.query.shape
    pool_rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    slots = 0 if call.kv_indices is None else call.kv_indices.shape[2]
    window = window_slots(call.sliding_window_size, tokens)
    packed = call.cu_seqlens is not None
    pool = pool_slots(call.kind, slots, pool_rows, tokens, call.compress_ratio or 1, packed)
    local_rows = tokens if window else 0
    width, rows = padded(window + pool), local_rows + pool_rows

    indices = torch.full((batch, tokens, width), -1, dtype=torch.int32, device=call.query.device)
    bounds = token_bounds(call)
    indices[..., :window] = _window(call, window, bounds)
    if pool:
        indices[..., window : window + pool] = _pool(call, pool, pool_rows, local_rows, bounds)
    place = torch.arange(1, width + 1, dtype=torch.int32, device=indices.device)
    lengths = torch.where(indices >= 0, place, 0).amax(-1)
    if batch > 1:
        first = torch.arange(batch, dtype=torch.int32, device=indices.device) * rows
        indices = torch.where(indices >= 0, indices + first[:, None, None], -1)

    return Operands(
        _table(call, local_rows, pool_rows),
        indices.reshape(batch * tokens, width),
        lengths.reshape(batch * tokens),
        local_rows,
    )


def _table(call: Call, local_rows: int, pool_rows: int) -> Tensor:
    parts = [call.local_kv.detach()] if local_rows else []
    if call.sparse_kv is not None and pool_rows:
        parts.append(call.sparse_kv.detach())
    if not parts:
        return call.local_kv.new_empty(0, call.local_kv.shape[3])
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    rows = joined.flatten(0, 2).contiguous()
    return rows if stride_class(rows) == "aligned" else rows.clone()


def _window(call: Call, window: int, bounds: TokenBounds | None) -> Tensor:
    """int32 ``[B or 1, T, window]``: the last ``window`` rows up to the token's own."""
    tokens, device = call.query.shape[2], call.query.device
    token = torch.arange(tokens, device=device, dtype=torch.int32)[:, None]
    back = torch.arange(window - 1, -1, -1, device=device, dtype=torch.int32)
    row = (token - back)[None]
    first = 0 if bounds is None else bounds.window_start[..., None]
    return torch.where((row >= first) & (row >= 0), row, -1)


def _pool(
    call: Call, pool: int, pool_rows: int, local_rows: int, bounds: TokenBounds | None
) -> Tensor:
    """``[B, T, pool]``: the selected rows, or the first visible ones of a dense pool."""
    start: Tensor | int = 0
    length: Tensor | int = pool_rows
    if bounds is not None:
        assert bounds.pool_start is not None
        assert bounds.pool_end is not None
        start = bounds.pool_start[..., None]
        length = (bounds.pool_end - bounds.pool_start)[..., None]
    if call.kind is Kind.GATHER:
        assert call.kv_indices is not None
        slot = call.kv_indices
    else:
        slot = torch.arange(pool, device=call.query.device, dtype=torch.int32)
    # Compared in the caller's width: an int64 slot need not fit 32 bits.
    used = (slot >= 0) & (slot < length)
    return torch.where(used, slot + (start + local_rows), -1)
