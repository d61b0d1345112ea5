"""Launcher of ``key_gradient_kernel``: gradients of window rows and dense-compressed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .key_gradient_kernel import key_gradient_kernel
from .launching import capability_of, launch, programs_to_fill
from .tile_table import Tile, key_gradient_tile
from .upstream import Upstream

PARTIAL_BYTES = 128 << 20
"""Most that partial sums of one gradient may take."""


def window_gradient(upstream: Upstream, tile: Tile | None = None) -> Tensor:
    """Gradient of ``local_kv``, ``[B, G, T, D]``."""
    if upstream.operands.window == 0:
        return _like(upstream.operands.local).zero_()
    return _gradient(upstream, upstream.operands.local, False, tile)


def dense_gradient(upstream: Upstream, tile: Tile | None = None) -> Tensor:
    """Gradient of the dense-compressed pool, ``[B, G, S, D]``."""
    pool = upstream.operands.pool
    assert pool is not None
    return _gradient(upstream, pool, True, tile)


def _like(kv: Tensor) -> Tensor:
    return torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)


def _gradient(upstream: Upstream, kv: Tensor, dense: bool, tile: Tile | None) -> Tensor:
    operands, _, lse, grad_output, delta = upstream
    call = operands.call
    query = call.query
    batch, _, tokens, head_dim = query.shape
    kv_heads, rows = kv.shape[1], kv.shape[2]
    if tile is None:
        tile = key_gradient_tile(capability_of(query), head_dim, operands.is_float32)
    key_blocks = -(-rows // tile.keys)
    programs = batch * kv_heads * key_blocks
    room = PARTIAL_BYTES // max(kv.numel() * 4, 1)
    parts = max(min(programs_to_fill(query) // max(programs, 1), room), 1)
    # One part writes the gradient itself.
    grad = _like(kv)
    target = grad
    if parts > 1:
        target = query.new_empty((parts, *kv.shape), dtype=torch.float32)
    first, last = _dense_ranges(upstream, rows, tile.keys) if dense else (None, None)
    launch(
        key_gradient_kernel,
        (batch * key_blocks * parts, kv_heads),
        (
            query,
            kv,
            *operands.tables,
            first,
            last,
            grad_output,
            lse,
            delta,
            target,
            *query.stride(),
            *kv.stride()[:3],
            *operands.table_strides,
            *grad_output.stride(),
            tokens,
            rows,
            operands.window,
            parts,
            batch,
            call.scale,
        ),
        warps=tile.warps,
        registers=tile.registers,
        DENSE=dense,
        BOUNDED=operands.bounds is not None,
        RANGE=upstream.is_float16,
        GROUP=operands.group,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        **operands.head_dim.constants,
    )
    if parts > 1:
        torch.sum(target, 0, out=grad) if grad.dtype == target.dtype else grad.copy_(target.sum(0))
    return grad


def _dense_ranges(upstream: Upstream, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """First and one-past-last token, int64 ``[B, key blocks]``, that may see a block of keys.

    Pool starts never decrease along T and neither do pool ends, except in the spare rows after
    the last document, which see nothing; hence the running maximum.
    """
    bounds = upstream.operands.bounds
    assert bounds is not None
    assert bounds.pool_start is not None
    assert bounds.pool_end is not None
    batch = bounds.pool_end.shape[0]
    block = torch.arange(0, rows, keys, device=bounds.pool_end.device, dtype=torch.int32)
    block = block.expand(batch, -1).contiguous()
    ends = bounds.pool_end.cummax(1).values
    first = torch.searchsorted(ends, block, right=True)
    last = torch.searchsorted(bounds.pool_start.contiguous(), (block + keys).clamp(max=rows))
    return first, last
