"""The Triton kernel that writes the table and the slots in one launch.

The first programs each write TOKENS x SLOTS of the slots of flat tokens ``b * T + t``:

    slot c of the window:   t - window + 1 + c      when that is >= max(0, WINDOW_START[b, t])
    slot c of the pool:     local_rows + start + i  when 0 <= i < length

with ``i`` the caller's index (gather) or ``c`` itself (dense-compressed), ``start`` and ``length``
the token's span of the pool; -1 everywhere else. The other programs each copy ROWS rows of
[local; sparse] into the table, as 16-bit patterns, so NaN stays the NaN it was.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa_dispatch import Call, Kind, SlotLayout, TokenBounds

from .operands import Operands, shared_table

TOKENS, ROWS = 16, 8
"""Tokens and rows one program handles: 8 KiB written by either kind."""

SLOTS = 128


@triton.jit
def _write_slots(
    KV_INDICES,
    WINDOW_START,
    POOL_START,
    POOL_END,
    INDICES,
    index_batch,
    index_token,
    index_slot,
    start_batch,
    start_token,
    pool_start_batch,
    pool_start_token,
    pool_end_batch,
    pool_end_token,
    batch_size,
    tokens,
    local_rows,
    pool_rows,
    window,
    pool,
    width,
    program,
    GATHER: tl.constexpr,
    BOUNDED: tl.constexpr,
    POOLED: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    chunks = width // SLOTS
    flat = (program // chunks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = (program % chunks) * SLOTS + tl.arange(0, SLOTS)
    inside = flat < batch_size.to(tl.int64) * tokens
    batch = flat // tokens
    token = flat % tokens
    first = tl.zeros([TOKENS], tl.int32)
    start = tl.zeros([TOKENS], tl.int32)
    length = tl.zeros([TOKENS], tl.int32) + pool_rows
    if BOUNDED:
        at = batch * start_batch + token * start_token
        first = tl.maximum(tl.load(WINDOW_START + at, mask=inside, other=0), 0)
        if POOLED:
            at = batch * pool_start_batch + token * pool_start_token
            start = tl.load(POOL_START + at, mask=inside, other=0)
            at = batch * pool_end_batch + token * pool_end_token
            length = tl.load(POOL_END + at, mask=inside, other=0) - start

    row = token.to(tl.int32)[:, None] - (window - 1) + column[None, :]
    slot = tl.where((column < window)[None, :] & (row >= first[:, None]), row, -1)
    entry = column - window
    in_pool = (entry >= 0) & (entry < pool)
    if GATHER:
        place = (batch * index_batch + token * index_token)[:, None]
        place += entry.to(tl.int64)[None, :] * index_slot
        chosen = tl.load(KV_INDICES + place, mask=inside[:, None] & in_pool[None, :], other=-1)
    else:
        chosen = tl.where(in_pool, entry, -1)[None, :]
    used = (chosen >= 0) & (chosen < length[:, None])
    row = tl.where(used, chosen, 0).to(tl.int32) + start[:, None] + local_rows
    slot = tl.where(used, row, slot)
    target = INDICES + flat[:, None] * width + column[None, :]
    tl.store(target, slot, mask=inside[:, None])


@triton.jit
def _copy_rows(
    LOCAL,
    SPARSE,
    TABLE,
    local_batch,
    local_row,
    local_column,
    sparse_batch,
    sparse_row,
    sparse_column,
    batch_size,
    local_rows,
    pool_rows,
    program,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    rows = local_rows + pool_rows
    flat = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = flat < batch_size.to(tl.int64) * rows
    batch = flat // rows
    row = flat % rows
    column = tl.arange(0, D)
    is_local = inside & (row < local_rows)
    is_sparse = inside & (row >= local_rows)
    place = (batch * local_batch + row * local_row)[:, None]
    place += column.to(tl.int64)[None, :] * local_column
    local = tl.load(LOCAL + place, mask=is_local[:, None], other=0)
    place = (batch * sparse_batch + (row - local_rows) * sparse_row)[:, None]
    place += column.to(tl.int64)[None, :] * sparse_column
    sparse = tl.load(SPARSE + place, mask=is_sparse[:, None], other=0)
    target = TABLE + flat[:, None] * D + column[None, :]
    tl.store(target, tl.where(is_local[:, None], local, sparse), mask=inside[:, None])


# Sizes that change from call to call must not compile the kernel anew.
@triton.jit(
    do_not_specialize=["batch_size", "tokens", "local_rows", "pool_rows", "index_programs"]
)
def operands_kernel(
    KV_INDICES,
    WINDOW_START,
    POOL_START,
    POOL_END,
    LOCAL,
    SPARSE,
    INDICES,
    TABLE,
    index_batch,
    index_token,
    index_slot,
    start_batch,
    start_token,
    pool_start_batch,
    pool_start_token,
    pool_end_batch,
    pool_end_token,
    local_batch,
    local_row,
    local_column,
    sparse_batch,
    sparse_row,
    sparse_column,
    batch_size,
    tokens,
    local_rows,
    pool_rows,
    window,
    pool,
    width,
    index_programs,
    GATHER: tl.constexpr,
    BOUNDED: tl.constexpr,
    POOLED: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    program = tl.program_id(0)
    if program < index_programs:
        _write_slots(
            KV_INDICES,
            WINDOW_START,
            POOL_START,
            POOL_END,
            INDICES,
            index_batch,
            index_token,
            index_slot,
            start_batch,
            start_token,
            pool_start_batch,
            pool_start_token,
            pool_end_batch,
            pool_end_token,
            batch_size,
            tokens,
            local_rows,
            pool_rows,
            window,
            pool,
            width,
            program,
            GATHER,
            BOUNDED,
            POOLED,
            TOKENS,
            SLOTS,
        )
    else:
        _copy_rows(
            LOCAL,
            SPARSE,
            TABLE,
            local_batch,
            local_row,
            local_column,
            sparse_batch,
            sparse_row,
            sparse_column,
            batch_size,
            local_rows,
            pool_rows,
            program - index_programs,
            ROWS,
            D,
        )


def write_operands(call: Call, layout: SlotLayout, bounds: TokenBounds | None) -> Operands:
    """Table and slots of a call, written by one kernel on the query's device."""
    query, local_kv, sparse_kv = call.query, call.local_kv.detach(), call.sparse_kv
    batch, _, tokens, head_dim = query.shape
    indices = query.new_empty(batch, tokens, layout.width, dtype=torch.int32)
    table = shared_table(call, layout)
    copied = 0
    if table is None:
        copied = layout.local_rows + layout.pool_rows
        table = local_kv.new_empty(batch, copied, 1, head_dim)
    index_programs = -(-batch * tokens // TOKENS) * (layout.width // SLOTS)
    programs = index_programs + -(-batch * copied // ROWS)
    if not programs:
        return Operands(table, indices, layout)

    local = _bits(local_kv)
    sparse = local if sparse_kv is None else _bits(sparse_kv.detach())
    chosen = call.kv_indices
    starts = (None, None, None) if bounds is None else tuple(bounds)
    guard = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    launch: Any = operands_kernel[(programs,)]
    with guard:
        launch(
            indices if chosen is None else chosen,
            *(indices if item is None else item for item in starts),
            local,
            sparse,
            indices,
            _bits(table),
            *((0, 0, 0) if chosen is None else chosen.stride()),
            *(step for item in starts for step in ((0, 0) if item is None else item.stride())),
            *_row_strides(local),
            *_row_strides(sparse),
            batch,
            tokens,
            layout.local_rows,
            layout.pool_rows,
            layout.window,
            layout.pool,
            layout.width,
            index_programs,
            GATHER=call.kind is Kind.GATHER,
            BOUNDED=bounds is not None,
            POOLED=layout.pool > 0,
            TOKENS=TOKENS,
            SLOTS=SLOTS,
            ROWS=ROWS,
            D=head_dim,
        )
    return Operands(table, indices, layout)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def _row_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Batch, row and column strides of a ``[B, 1, N, D]`` tensor."""
    batch, _, row, column = tensor.stride()
    return batch, row, column
