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

SORT_BYTES = 128 << 20
"""Most that sorting may take, beside a chunk's buffers."""

SORT_BYTES_A_SLOT = 48
"""Keys, positions and what torch's sort copies of both."""

SORT_BYTES_A_ROW = 24
"""Its number and its pointer, for each chunk."""


class PoolRows:
    """Some columns of a gathered pool's gradient in the making.

    Attributes:
        total: fp32 ``[B, G, S, columns]``.
    """

    def __init__(
        self,
        upstream: Upstream,
        stored: Stored,
        atomic: bool,
        columns: slice = slice(None),
        tile: SlotTile | None = None,
    ) -> None:
        self._stored, self._tile = stored, tile
        operands, *_, grad_output, _ = upstream
        call, pool = operands.call, operands.pool
        assert pool is not None
        # The rows' columns are those of the query and of the upstream gradient.
        call = call._replace(query=call.query[..., columns])
        self._upstream = upstream._replace(
            operands=operands._replace(call=call), grad_output=grad_output[..., columns]
        )
        self._orders = None if atomic else SlotOrders(operands, stored.chunk)
        shape = pool[..., columns].shape
        self.total = torch.zeros(shape, dtype=torch.float32, device=pool.device)

    def add(self, first: int, end: int) -> None:
        """Add what the chunk of flat tokens ``first .. end - 1`` selected."""
        if self._orders is None:
            _slot_rows(self._upstream, self._stored, self.total, first, end, True, self._tile)
            return
        operands = self._upstream.operands
        entry, pointers = self._orders.chunk(first)
        query = operands.call.query
        shape = (end - first, operands.kv_heads, operands.slots, query.shape[3])
        rows = query.new_empty(shape, dtype=self._stored.p.dtype)
        _slot_rows(self._upstream, self._stored, rows, first, end, False, self._tile)
        _add_in_order(operands, rows, entry, pointers, self.total)


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
        tile = slot_rows_tile(capability_of(query), operands.group, head_dim, query.element_size())
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


def _add_in_order(
    operands: Operands, rows: Tensor, entry: Tensor, pointers: Tensor, total: Tensor
) -> None:
    batch, kv_heads, pool_rows, head_dim = total.shape
    columns = 64
    while columns < min(head_dim, 512):
        columns *= 2
    launch(
        row_sum_kernel,
        (batch * pool_rows * -(-head_dim // columns), kv_heads),
        (rows, entry, pointers, total, operands.slots, pool_rows),
        warps=4,
        D=head_dim,
        COLUMNS=columns,
        ENTRIES=4096 // columns,
        STAGES=3,
    )


class SlotOrders:
    """For each chunk of tokens, its slots in the order of the pool rows they chose.

    Sorting costs a dozen launches, so many chunks are sorted at once.
    """

    def __init__(self, operands: Operands, chunk: int) -> None:
        self._operands, self._tokens = operands, chunk
        pool_rows = operands.call.query.shape[0] * operands.pool_rows + 1
        chunk_bytes = chunk * operands.slots * SORT_BYTES_A_SLOT + pool_rows * SORT_BYTES_A_ROW
        self._together = max(SORT_BYTES // chunk_bytes, 1)
        self._first = -1
        self._sorted: tuple[Tensor, Tensor] | None = None

    def chunk(self, first: int) -> tuple[Tensor, Tensor]:
        """The order of the chunk that begins at flat token ``first``.

        Returns:
            entry: int32, see ``slot_order``.
            pointers: int64 ``[B * S + 1]``, where each pool row's entries start.
        """
        index = first // self._tokens
        group = index // self._together
        if group != self._first:
            self._first = group
            self._sorted = None
            self._sorted = slot_order(
                self._operands, group * self._together * self._tokens, self._tokens, self._together
            )
        assert self._sorted is not None
        entry, pointers = self._sorted
        return entry, pointers[index % self._together]


def slot_order(operands: Operands, first: int, chunk: int, chunks: int) -> tuple[Tensor, Tensor]:
    """Sort the slots of up to ``chunks`` chunks of flat tokens that begin at ``first``.

    Returns:
        entry: int32, each slot's position ``token * K + slot`` within its own chunk, stably
            sorted by chunk and chosen row, unused slots after a chunk's rows.
        pointers: int64 ``[chunks, B * S + 1]``, where each row's entries start.
    """
    indices = operands.call.kv_indices
    assert indices is not None
    batch, tokens, slots = indices.shape
    pool_rows = operands.pool_rows
    end = min(first + chunk * chunks, batch * tokens)
    flat = indices.reshape(batch * tokens, slots)[first:end]
    token = torch.arange(first, end, device=indices.device)
    row = token // tokens * pool_rows
    span: Tensor | int = pool_rows
    _, pool_start, pool_end = operands.tables
    if pool_start is not None and pool_end is not None:
        start = pool_start.reshape(-1)[first:end]
        span = (pool_end.reshape(-1)[first:end] - start)[:, None]
        row = row + start
    used = (flat >= 0) & (flat < span)
    all_rows = batch * pool_rows
    key = torch.where(used, flat + row[:, None], all_rows)
    key = key + ((token - first) // chunk * (all_rows + 1))[:, None]
    small = (all_rows + 1) * chunks < 2**31
    key = key.to(torch.int32 if small else torch.int64).reshape(-1)
    ordered, position = torch.sort(key, stable=True)
    entry = (position % (chunk * slots)).to(torch.int32)
    bounds = torch.arange((all_rows + 1) * chunks, device=key.device, dtype=key.dtype)
    return entry, torch.searchsorted(ordered, bounds).view(chunks, all_rows + 1)
