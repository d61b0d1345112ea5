"""KV gradients of the Hopper kernels in a fixed order, for deterministic backwards.

The tokens are worked on in chunks. Of each the backward kernel stores what every token adds to
every row of KV, in bf16; then each row's terms are added in token order, a pool row's through a
CSR of the chunk's slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .hopper_operands import HEAD_BLOCK, HEAD_DIM, cast_rows, multiprocessors
from .launching import launch
from .operands import Operands
from .pool_rows import SORT_BYTES, SlotOrders
from .workspace import room

CHUNK_BYTES = 336 << 20
"""Most that a chunk's rows take, the pool's fp32 sums included; sorting takes 128 MiB besides."""

TOGETHER = 8
STAGES = 3

Start = Callable[[Tensor, int, int, int, int], None]
"""Start the backward kernel: where it stores, places of a token and blocks of them that are the
window's, first flat token and one past the last."""


def ordered_gradients(
    operands: Operands, plan: Tensor, start: Start, local: bool, pool: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``local_kv`` and ``sparse_kv``, those of them that are wanted."""
    call = operands.call
    batch, heads, tokens, _ = call.query.shape
    rows, window = batch * tokens, operands.window
    head_blocks = -(-heads // HEAD_BLOCK)
    window_blocks, slot_blocks = -(-window // 64), -(-operands.slots // 64)
    places = 64 * max(window_blocks + slot_blocks, 1)
    pool_rows = batch * operands.pool_rows
    summed = pool and pool_rows > 0 and operands.slots > 0
    chunk = chunk_tokens(call.query, rows, head_blocks, places, pool_rows if summed else 0)

    orders = SlotOrders(operands, chunk) if summed else None
    order = None if orders is None else orders.chunk(0)
    new = call.query.new_empty
    partial = new((chunk * head_blocks, places, HEAD_DIM))
    totals = torch.zeros(pool_rows, HEAD_DIM, device=partial.device) if summed else None
    grad_local = new(call.local_kv.shape) if local else None
    carry = [new((max(window, 1), HEAD_DIM), dtype=torch.float32) for _ in range(2)]
    for first in range(0, rows, chunk):
        end = min(first + chunk, rows)
        start(partial, places, window_blocks, first, end)
        if totals is not None and orders is not None:
            entry, pointers = order or orders.chunk(first)
            order = None
            launch(
                _kernels().pool_sums_kernel,
                (pool_rows,),
                (partial, entry, pointers, totals, operands.slots, places, 64 * window_blocks),
                warps=4,
                HEAD_BLOCKS=head_blocks,
                D=HEAD_DIM,
                TOGETHER=TOGETHER,
                STAGES=STAGES,
            )
        if grad_local is not None and window > 0:
            lowest = max(first - window + 1, 0)
            launch(
                _kernels().window_sums_kernel,
                (end - lowest,),
                (
                    partial,
                    plan,
                    *carry,
                    grad_local,
                    grad_local.stride(0),
                    grad_local.stride(2),
                    rows,
                    tokens,
                    window,
                    places,
                    first,
                    end,
                    lowest,
                ),
                warps=4,
                HEAD_BLOCKS=head_blocks,
                D=HEAD_DIM,
                TOGETHER=TOGETHER,
                STAGES=STAGES,
            )
            carry.reverse()
    if grad_local is not None and window == 0:
        grad_local.zero_()
    grad_pool = None
    if pool and call.sparse_kv is not None:
        like = call.sparse_kv
        grad_pool = torch.zeros_like(like) if totals is None else cast_rows(totals, like)
    return grad_local, grad_pool


def _kernels():
    from . import ordered_sums_kernel

    return ordered_sums_kernel


def chunk_tokens(query: Tensor, rows: int, head_blocks: int, places: int, pool_rows: int) -> int:
    """Tokens of a chunk: full rounds of the persistent programs, as many as there is room for."""
    batch, heads, tokens, _ = query.shape
    free = room(CHUNK_BYTES, SORT_BYTES, batch, heads, tokens) - pool_rows * HEAD_DIM * 4
    items = max(free // (places * HEAD_DIM * 2), 1)
    programs = multiprocessors(query)
    if items > programs:
        items -= items % programs
    return min(max(items // head_blocks, 1), rows)
