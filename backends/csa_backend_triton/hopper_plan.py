"""What each token of a call has to visit: one small kernel ahead of the Hopper kernels.

One program plans TOKENS tokens. It reads their documents' bounds and their slots, and writes

    blocks       key blocks of 64 to visit: ceil(window_rows / 64) + ceil(end / 64), where end is
                 the last used slot + 1, so that trailing unused slots cost nothing (or the
                 visible entries of a dense-compressed pool); 0 for a token that sees no key
    window_rows  rows of local_kv in the window, min(W, t + 1 - window_start); the last is row t
    pool_start   row of sparse_kv that index 0 means
    pool_length  indices below it are used; 0 when no slot of the token is used

as four planes of an int32 table ``[4, B*T]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_KEYS = 64

INTEGERS = (
    "indices_b",
    "indices_t",
    "window_start_b",
    "window_start_t",
    "pool_start_b",
    "pool_start_t",
    "pool_end_b",
    "pool_end_t",
    "rows",
    "tokens",
    "slots",
    "pool",
    "window",
)


@triton.jit(do_not_specialize=INTEGERS)
def plan_kernel(
    INDICES,
    WINDOW_START,
    POOL_START,
    POOL_END,
    PLAN,
    indices_b,
    indices_t,
    window_start_b,
    window_start_t,
    pool_start_b,
    pool_start_t,
    pool_end_b,
    pool_end_t,
    rows,
    tokens,
    slots,
    pool,
    window,
    HAS_BOUNDS: tl.constexpr,
    DENSE: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = row < rows
    b = (row // tokens).to(tl.int64)
    t = row % tokens
    pool_first = tl.zeros([TOKENS], tl.int32)
    pool_length = tl.zeros([TOKENS], tl.int32) + pool
    start = tl.zeros([TOKENS], tl.int32)
    if HAS_BOUNDS:
        start = tl.load(WINDOW_START + b * window_start_b + t * window_start_t, live, 0)
        if POOL_START is not None:
            pool_first = tl.load(POOL_START + b * pool_start_b + t * pool_start_t, live, 0)
            pool_end = tl.load(POOL_END + b * pool_end_b + t * pool_end_t, live, 0)
            pool_length = pool_end - pool_first
    window_rows = tl.maximum(tl.minimum(t + 1 - start, window), 0)

    end = tl.zeros([TOKENS], tl.int32)
    if DENSE:
        end = tl.maximum(pool_length, 0)
    slot_row = INDICES + b * indices_b + t.to(tl.int64) * indices_t
    for begin in range(0, slots, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        here = live[:, None] & (slot < slots)[None, :]
        index = tl.load(slot_row[:, None] + slot[None, :], here, -1)
        used = (index >= 0) & (index < pool_length[:, None])
        end = tl.maximum(end, tl.max(tl.where(used, slot[None, :] + 1, 0), 1))

    blocks = (window_rows + KEYS - 1) // KEYS + (end + KEYS - 1) // KEYS
    tl.store(PLAN + row, blocks, live)
    tl.store(PLAN + rows + row, window_rows, live)
    tl.store(PLAN + 2 * rows + row, pool_first, live)
    tl.store(PLAN + 3 * rows + row, tl.where(end > 0, pool_length, 0), live)
