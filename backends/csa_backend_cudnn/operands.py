"""What cuDNN reads: KV rows of all batch entries in one table, and int32 slots into it.

The table is [local; sparse] of the first batch entry, then of the next. Slots are absolute row
numbers, so batch entries and documents are a matter of which slots are used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, slot_layout, slot_rows, token_bounds
from csa_dispatch.call_spec import stride_class


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
    layout = slot_layout(call)
    indices = slot_rows(call, layout, token_bounds(call))
    width, local_rows = layout.width, layout.local_rows
    rows = local_rows + layout.pool_rows
    place = torch.arange(1, width + 1, dtype=torch.int32, device=indices.device)
    lengths = torch.where(indices >= 0, place, 0).amax(-1)
    if batch > 1:
        first = torch.arange(batch, dtype=torch.int32, device=indices.device) * rows
        indices = torch.where(indices >= 0, indices + first[:, None, None], -1)

    return Operands(
        _table(call, local_rows, layout.pool_rows),
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
