"""Gradient of a gathered pool from stored P and dS.

Every token's heads are summed into one row a slot. The rows are added to an fp32 buffer
atomically or, when the result must repeat itself, stored and added in token order through a
CSR of the chunk, built by a stable sort on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launching import capability_of, launch
from .operands import Operands
from .row_sum_kernel import row_sum_kernel
from .slot_rows_kernel import slot_rows_kernel
from .stored_scores import Stored
from .tile_table import SlotTile, slot_rows_tile
from .upstream import Upstream


def add_pool_rows(
    upstream: Upstream,
    stored: Stored,
    total: Tensor,
    first: int,
    end: int,
    atomic: bool,
    tile: SlotTile | None = None,
) -> None:
    """Add the rows of flat tokens ``first .. end - 1`` to ``total``, ``[B, G, S, D]`` fp32."""
    if atomic:
        _slot_rows(upstream, stored, total, first, end, True, tile)
        return
    operands = upstream.operands
    query = operands.call.query
    shape = (end - first, operands.kv_heads, operands.slots, query.shape[3])
    rows = query.new_empty(shape, dtype=stored.p.dtype)
    _slot_rows(upstream, stored, rows, first, end, False, tile)
    _add_in_order(operands, rows, total, first, end)


def _slot_rows(
    upstream: Upstream,
    stored: Stored,
    rows: Tensor,
    first: int,
    end: int,
    atomic: bool,
    tile: SlotTile | None,
) -> None:
    operands, _, lse, grad_output, delta = upstream
    call = operands.call
    query, indices = call.query, call.kv_indices
    assert indices is not None
    head_dim = query.shape[3]
    if tile is None:
        tile = slot_rows_tile(
            capability_of(query), operands.group, head_dim, query.dtype != torch.bfloat16
        )
    _, *pool_tables = operands.tables
    _, _, *pool_table_strides = operands.table_strides
    launch(
        slot_rows_kernel,
        ((end - first) * -(-head_dim // tile.columns), operands.kv_heads),
        (
            query,
            indices,
            *pool_tables,
            grad_output,
            lse,
            delta,
            stored.p,
            stored.ds,
            stored.used_end,
            rows,
            *query.stride(),
            *indices.stride(),
            *pool_table_strides,
            *grad_output.stride(),
            query.shape[2],
            operands.pool_rows,
            operands.slots,
            first,
            stored.ring,
            stored.places,
            operands.window if stored.window else 0,
            stored.padded_heads,
        ),
        warps=tile.warps,
        BOUNDED=operands.bounds is not None,
        ATOMIC=atomic,
        RANGE=upstream.is_float16,
        GROUP=operands.group,
        D=head_dim,
        COLUMNS=tile.columns,
        HEADS=tile.heads,
        SLOTS=tile.slots,
        STAGES=tile.stages,
    )


def _add_in_order(operands: Operands, rows: Tensor, total: Tensor, first: int, end: int) -> None:
    batch, kv_heads, pool_rows, head_dim = total.shape
    entry, pointers = slot_csr(operands, first, end)
    columns = 128 if head_dim > 64 else 64
    launch(
        row_sum_kernel,
        (batch * pool_rows * -(-head_dim // columns), kv_heads),
        (rows, entry, pointers, total, operands.slots, pool_rows),
        warps=4,
        D=head_dim,
        COLUMNS=columns,
        ENTRIES=16,
        STAGES=3,
    )


def slot_csr(operands: Operands, first: int, end: int) -> tuple[Tensor, Tensor]:
    """The slots of flat tokens ``first .. end - 1``, sorted by the pool row they chose.

    Returns:
        entry: int64, positions ``(token - first) * K + slot``, stably sorted by chosen row,
            unused slots last.
        pointers: int64 ``[B * S + 1]``, where each row's entries start.
    """
    indices = operands.call.kv_indices
    assert indices is not None
    batch, tokens, slots = indices.shape
    pool_rows = operands.pool_rows
    chunk = indices.reshape(batch * tokens, slots)[first:end]
    place = torch.arange(first, end, device=indices.device) // tokens * pool_rows
    span: Tensor | int = pool_rows
    _, pool_start, pool_end = operands.tables
    if pool_start is not None and pool_end is not None:
        start = pool_start.reshape(-1)[first:end]
        span = (pool_end.reshape(-1)[first:end] - start)[:, None]
        place = place + start
    used = (chunk >= 0) & (chunk < span)
    all_rows = batch * pool_rows
    key = torch.where(used, chunk + place[:, None], all_rows)
    key = key.to(torch.int32 if all_rows < 2**31 else torch.int64).reshape(-1)
    ordered, entry = torch.sort(key, stable=True)
    row = torch.arange(all_rows + 1, device=key.device, dtype=key.dtype)
    return entry, torch.searchsorted(ordered, row)
