"""Gradient of a gathered pool, chunk by chunk of tokens so that its workspace is bounded.

Each chunk stores P and dS (``token_gradient``), then sums every token's heads into rows. The
rows are added to an fp32 buffer atomically, or, when the result must be reproducible, stored
and added in token order through a CSR of the chunk built by a stable sort on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launching import capability_of, launch
from .operands import Operands
from .row_sum_kernel import row_sum_kernel
from .slot_gradient_kernel import slot_gradient_kernel
from .tile_table import SlotTile, Tile, slot_gradient_tile
from .upstream import Stored, Upstream, token_gradient

WORKSPACE_BYTES = 352 << 20
"""Most that a chunk's buffers may take, beside delta and the fp32 pool gradient."""

SORT_BYTES = 40
"""Bytes a slot costs while its chunk is sorted: keys and int64 positions, in and out."""


def slot_gradient(
    upstream: Upstream,
    grad_query: Tensor | None,
    deterministic: bool,
    workspace: int = WORKSPACE_BYTES,
    token_tile: Tile | None = None,
    slot_tile: SlotTile | None = None,
) -> Tensor:
    """Gradient of the pool, ``[B, G, S, D]``; also writes delta and ``grad_query``.

    ``workspace`` is in bytes; the tiles override the tables, for tuning.
    """
    operands = upstream.operands
    query, pool = operands.call.query, operands.pool
    assert pool is not None
    batch, heads, tokens, head_dim = query.shape
    padded = -(-operands.slots // 64) * 64
    stored_dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    size = stored_dtype.itemsize
    token_bytes = 2 * heads * padded * size
    if deterministic:
        token_bytes += operands.kv_heads * padded * head_dim * size + operands.slots * SORT_BYTES
    flat_tokens = batch * tokens
    chunks = -(-flat_tokens // max(workspace // token_bytes, 1))
    chunk = -(-flat_tokens // chunks)

    total = torch.zeros(pool.shape, dtype=torch.float32, device=pool.device)
    p = query.new_empty((chunk, heads, padded), dtype=stored_dtype)
    ds = torch.empty_like(p)
    used_end = query.new_empty(chunk, dtype=torch.int32)
    rows = total
    if deterministic:
        rows = query.new_empty((chunk, operands.kv_heads, padded, head_dim), dtype=stored_dtype)
    for first in range(0, flat_tokens, chunk):
        count = min(chunk, flat_tokens - first)
        stored = Stored(p, ds, used_end[:count], first)
        token_gradient(upstream, grad_query, stored, token_tile)
        _token_rows(upstream, stored, rows, not deterministic, slot_tile)
        if deterministic:
            _add_in_order(operands, rows, total, first, count)
    return total.to(pool.dtype)


def _token_rows(
    upstream: Upstream, stored: Stored, rows: Tensor, atomic: bool, tile: SlotTile | None
) -> None:
    operands, _, lse, grad_output, _ = upstream
    call = operands.call
    query, indices = call.query, call.kv_indices
    assert indices is not None
    head_dim = query.shape[3]
    if tile is None:
        tile = slot_gradient_tile(
            capability_of(query), operands.group, head_dim, operands.is_float32
        )
    _, *pool_tables = operands.tables
    _, _, *pool_table_strides = operands.table_strides
    launch(
        slot_gradient_kernel,
        (stored.used_end.shape[0] * -(-head_dim // tile.columns), operands.kv_heads),
        (
            query,
            indices,
            *pool_tables,
            grad_output,
            lse,
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
            stored.first_token,
            stored.p.shape[2],
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


def _add_in_order(operands: Operands, rows: Tensor, total: Tensor, first: int, count: int) -> None:
    """Add a chunk's stored rows to ``total``, each pool row's terms in token order."""
    batch, kv_heads, pool_rows, head_dim = total.shape
    entry, pointers = slot_csr(operands, first, count)
    columns = 128 if head_dim > 64 else 64
    launch(
        row_sum_kernel,
        (batch * pool_rows * -(-head_dim // columns), kv_heads),
        (
            rows,
            entry,
            pointers,
            total,
            operands.slots,
            rows.shape[2],
            pool_rows,
        ),
        warps=4,
        D=head_dim,
        COLUMNS=columns,
        ENTRIES=16,
        STAGES=3,
    )


def slot_csr(operands: Operands, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The used slots of ``count`` flat tokens from ``first``, sorted by the row they chose.

    Returns:
        entry: int64, position ``token * K + slot`` in the chunk, stably sorted by chosen row,
            unused slots last.
        pointers: int64 ``[B * S + 1]``, where each row's entries start.
    """
    indices = operands.call.kv_indices
    assert indices is not None
    batch, tokens, slots = indices.shape
    pool_rows = operands.pool_rows
    chunk = indices.reshape(batch * tokens, slots)[first : first + count]
    place = torch.arange(first, first + count, device=indices.device) // tokens * pool_rows
    if operands.bounds is None:
        span = pool_rows
    else:
        _, pool_start, pool_end = operands.tables
        assert pool_start is not None
        assert pool_end is not None
        start = pool_start.reshape(-1)[first : first + count]
        span = (pool_end.reshape(-1)[first : first + count] - start)[:, None]
        place = place + start
    used = (chunk >= 0) & (chunk < span)
    all_rows = batch * pool_rows
    key = torch.where(used, chunk + place[:, None], all_rows)
    key = key.to(torch.int32 if all_rows < 2**31 else torch.int64).reshape(-1)
    ordered, entry = torch.sort(key, stable=True)
    row = torch.arange(all_rows + 1, device=key.device, dtype=key.dtype)
    return entry, torch.searchsorted(ordered, row)
