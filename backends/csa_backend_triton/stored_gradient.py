"""KV gradients from stored P and dS, chunk by chunk of tokens so that workspace is bounded.

For each chunk ``token_gradient`` computes the query's gradient and stores P and dS. Then every
token's heads are summed into rows: the selected pool rows, and the window rows of all key
blocks whose last reader is done.
"""

from __future__ import annotations

from torch import Tensor

from .pool_rows import PoolRows
from .stored_scores import WORKSPACE_BYTES, allocate
from .tile_table import SlotTile, Tile, WindowTile
from .upstream import Upstream, token_gradient
from .window_rows import WindowRows


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

    Also writes delta and ``grad_query``. ``workspace`` is in bytes; tiles override the tables,
    for tuning.
    """
    operands = upstream.operands
    batch, _, tokens, _ = operands.call.query.shape
    stored = allocate(operands, window, slots, deterministic, workspace)
    pool = PoolRows(upstream, stored, not deterministic, slot_tile) if slots else None
    rows = WindowRows(upstream, stored, window_tile) if window else None
    for first in range(0, batch * tokens, stored.chunk):
        end = min(first + stored.chunk, batch * tokens)
        token_gradient(upstream, grad_query, stored, first, end, token_tile)
        if pool is not None:
            pool.add(first, end)
        if rows is not None:
            rows.advance(end)
    grad_local = None if rows is None else rows.gradient()
    return grad_local, None if pool is None else pool.gradient()
