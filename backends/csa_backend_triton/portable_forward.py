"""Launcher of the portable forward kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.call import Call, TokenBounds

from .forward_kernel import forward_kernel
from .launching import capability_of, launch
from .operands import SCAN, operands_of, tile_programs
from .tile_table import Tile, forward_tile

LOG2_E = 1.4426950408889634


def forward(
    call: Call, bounds: TokenBounds | None, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Output (like the query) and lse (``[B, H, T]`` fp32); nothing else is written.

    ``tile`` overrides the table, for tuning.
    """
    query = call.query
    batch, heads, tokens, head_dim = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    operands = operands_of(call, bounds)
    if tile is None:
        tile = forward_tile(
            capability_of(query),
            head_dim,
            operands.wanted_rows(),
            operands.is_float32,
            packed=not operands.tile_is_single(64),
        )
    single = operands.tile_is_single(tile.rows)
    launch(
        forward_kernel,
        (tile_programs(operands, tile.rows, single), operands.kv_heads),
        (
            query,
            operands.local,
            operands.pool,
            call.kv_indices,
            call.attention_sink,
            *operands.tables,
            out,
            lse,
            *query.stride(),
            *operands.local_strides,
            *operands.pool_strides,
            *operands.index_strides,
            *operands.table_strides,
            *out.stride(),
            0 if call.attention_sink is None else call.attention_sink.stride(0),
            tokens,
            operands.pool_rows,
            operands.slots,
            operands.window,
            call.scale * LOG2_E,
        ),
        warps=tile.warps,
        registers=tile.registers,
        KIND=call.kind.value,
        BOUNDED=bounds is not None,
        HAS_SINK=call.attention_sink is not None,
        GROUP=operands.group,
        ROWS=tile.rows,
        KEYS=tile.keys,
        SINGLE=single,
        STAGES=tile.stages,
        SCAN=SCAN,
        **operands.head_dim.constants,
    )
    return out, lse
