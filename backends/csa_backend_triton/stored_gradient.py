"""KV gradients from stored P and dS, chunk by chunk of tokens so that workspace is bounded.

For each chunk ``token_gradient`` computes the query's gradient and stores P and dS. Then every
token's heads are summed into rows: the selected pool rows, and the window rows of all key
blocks whose last reader is done.

A pool whose fp32 sums would take more than their share of the workspace is summed in pieces of
its columns, for each of which P and dS are computed anew.
"""

from __future__ import annotations

from torch import Tensor

from .operands import Operands
from .pool_rows import SORT_BYTES, PoolRows
from .stored_scores import CHUNK_BYTES, WORKSPACE_BYTES, allocate
from .tile_table import SlotTile, Tile, WindowTile
from .upstream import Upstream, token_gradient
from .window_rows import WindowRows, partial_bytes
from .workspace import room


def stored_gradient(
    upstream: Upstream,
    grad_query: Tensor | None,
    *,
    window: bool,
    slots: bool,
    deterministic: bool,
    workspace: int = WORKSPACE_BYTES,
    token_tile: Tile | None = None,
    slot_tile: SlotTile | None = None,
    window_tile: WindowTile | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``local_kv`` (if ``window``) and of the gathered pool (if ``slots``).

    Also writes delta and ``grad_query``. ``workspace`` is in bytes, kept to unless one token or
    64 columns of the sums need more; tiles override the tables, for tuning.
    """
    operands = upstream.operands
    batch, heads, tokens, _ = operands.call.query.shape
    besides = SORT_BYTES if slots and deterministic else 0
    besides += partial_bytes(operands) if window else 0
    workspace = room(workspace, besides, batch, heads, tokens)
    grad_pool = None
    if slots and operands.pool is not None:
        grad_pool = operands.pool.new_empty(operands.pool.shape)
    width = columns_at_once(operands, workspace) if slots else operands.head_dim.size
    sums = _sum_bytes(operands, width) if slots else 0
    # Sums that outgrow the workspace leave chunks their share: short ones would take forever.
    rest = max(workspace - sums, workspace * 2 // 5)
    stored = allocate(operands, window, slots, deterministic, min(rest, CHUNK_BYTES))
    rows = WindowRows(upstream, stored, window_tile) if window else None
    for column in range(0, operands.head_dim.size, width):
        columns = slice(column, min(column + width, operands.head_dim.size))
        pool = PoolRows(upstream, stored, not deterministic, columns, slot_tile) if slots else None
        for first in range(0, batch * tokens, stored.chunk):
            end = min(first + stored.chunk, batch * tokens)
            token_gradient(upstream, grad_query, stored, first, end, token_tile)
            if pool is not None:
                pool.add(first, end)
            if rows is not None and column == 0:
                rows.advance(end)
        grad_query = None
        if pool is not None and grad_pool is not None:
            grad_pool[..., columns] = pool.total
        del pool
    return None if rows is None else rows.gradient(), grad_pool


def _sum_bytes(operands: Operands, columns: int) -> int:
    batch = operands.call.query.shape[0]
    return 4 * batch * operands.kv_heads * operands.pool_rows * columns


def columns_at_once(operands: Operands, workspace: int) -> int:
    """Columns of the pool's sums, in pieces of 64, that fit in three fifths of the workspace."""
    size = operands.head_dim.size
    fitting = workspace * 3 // 5 // max(_sum_bytes(operands, 1), 1)
    return size if fitting >= size else max(fitting // 64 * 64, 64)
