"""What the parts of the backward share: operands, the forward's results, grad_output, delta."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .launching import capability_of, launch
from .operands import SCAN, Operands, tile_programs
from .stored_scores import Stored
from .tile_table import Tile, token_gradient_tile
from .token_gradient_kernel import token_gradient_kernel


class Upstream(NamedTuple):
    """State of one backward.

    Attributes:
        output, lse: the forward's results; ``lse`` ``[B, H, T]`` fp32 contiguous.
        grad_output: ``[B, H, T, D]``, any strides.
        delta: ``[B, H, T]`` fp32, written by the first ``token_gradient`` over each token.
    """

    operands: Operands
    output: Tensor
    lse: Tensor
    grad_output: Tensor
    delta: Tensor

    @property
    def is_float16(self) -> bool:
        """Whether dS needs a running factor to stay inside the element type's range."""
        return self.output.dtype == torch.float16


def token_gradient(
    upstream: Upstream,
    grad_query: Tensor | None,
    stored: Stored | None = None,
    first: int = 0,
    end: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Write delta and, where wanted, ``grad_query`` and ``stored``.

    With ``stored`` it covers the flat tokens ``first .. end - 1``, without it all of them.
    ``tile`` overrides the table, for tuning.
    """
    operands, output, lse, grad_output, delta = upstream
    call = operands.call
    query = call.query
    tokens = query.shape[2]
    if tile is None:
        rows = operands.group if stored is not None else operands.wanted_rows()
        tile = token_gradient_tile(capability_of(query), query.shape[3], rows, operands.is_float32)
    single = stored is not None or operands.tile_is_single(tile.rows)
    programs = tile_programs(operands, tile.rows, single)
    first_program = 0
    if stored is not None and end is not None:
        head_blocks = -(-operands.group // tile.rows)
        first_program = first * head_blocks
        programs = (end - first) * head_blocks
    launch(
        token_gradient_kernel,
        (programs, operands.kv_heads),
        (
            query,
            operands.local,
            operands.pool,
            call.kv_indices,
            *operands.tables,
            output,
            grad_output,
            lse,
            delta,
            grad_query,
            None if stored is None else stored.p,
            None if stored is None else stored.ds,
            None if stored is None else stored.used_end,
            *query.stride(),
            *operands.local_strides,
            *operands.pool_strides,
            *operands.index_strides,
            *operands.table_strides,
            *output.stride(),
            *grad_output.stride(),
            *((0, 0, 0, 0) if grad_query is None else grad_query.stride()),
            tokens,
            operands.pool_rows,
            operands.slots,
            operands.window,
            first_program,
            *((1, 0, 0) if stored is None else stored.p.shape),
            call.scale,
        ),
        warps=tile.warps,
        registers=tile.registers,
        KIND=call.kind.value,
        BOUNDED=operands.bounds is not None,
        NEED_QUERY=grad_query is not None,
        STORE_WINDOW=stored is not None and stored.window,
        STORE_SLOTS=stored is not None and stored.used_end is not None,
        RANGE=upstream.is_float16,
        GROUP=operands.group,
        ROWS=tile.rows,
        KEYS=tile.keys,
        SINGLE=single,
        STAGES=tile.stages,
        SCAN=SCAN,
        **operands.head_dim.constants,
    )
