"""Gradient of window rows from stored P and dS, without atomics.

One program owns KEYS rows of ``local_kv``, one KV head and COLUMNS columns, and walks the
tokens whose windows hold some of them, t .. t + W - 1 for key t:

    rows += P_t^T dO_t + dS_t^T Q_t        [KEYS, COLUMNS], contracted over the group's heads

``token_gradient_kernel`` stored P and dS. Beside ``key_gradient_kernel``, which recomputes
them, this needs two products a block instead of four and no key tile, which pays where the
head dimension is wide. The tokens may be cut into parts whose fp32 partial rows the launcher
adds in a fixed order. Rows come out as ``[parts, blocks, G, KEYS, D]``.
"""

import triton
import triton.language as tl

from .head_sums import add_heads, load_heads, sound_heads
from .tiles import power_of_two


@triton.jit(do_not_specialize=["tokens", "window", "first_block", "parts", "ring", "places"])
def window_rows_kernel(
    QUERY,
    WINDOW_START,
    GRAD_OUT,
    LSE,
    DELTA,
    P,
    DS,
    ROWS_OUT,
    q_b,
    q_h,
    q_t,
    q_d,
    w_b,
    w_t,
    do_b,
    do_h,
    do_t,
    do_d,
    tokens,
    window,
    first_block,
    parts,
    ring,
    places,
    padded_heads,
    BOUNDED: tl.constexpr,
    RANGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    pieces: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    piece = program % pieces
    part = (program // pieces) % parts
    local = program // pieces // parts
    blocks = tl.num_programs(0) // pieces // parts
    key_blocks = tl.cdiv(tokens, KEYS)
    block = first_block + local
    batch = (block // key_blocks).to(tl.int64)
    begin = (block % key_blocks) * KEYS
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)

    key = begin + tl.arange(0, KEYS)
    end = tl.minimum(begin + KEYS - 1 + window, tokens)
    share = tl.cdiv(end - begin, parts)
    begin += part * share
    end = tl.minimum(begin + share, end)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    query = QUERY + batch * q_b
    grad_out = GRAD_OUT + batch * do_b
    plane = batch * kv_heads * GROUP * tokens
    acc = tl.zeros([KEYS, COLUMNS], tl.float32)
    # P times 2**15 still fits fp16, hence the start of the running exponent.
    exponent = tl.full([KEYS], 15, tl.int32)

    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    for step in tl.range(begin * head_blocks, end * head_blocks, num_stages=STAGES):
        token = step // head_blocks
        token64 = tl.cast(token, tl.int64)
        first = tl.maximum(token - window + 1, 0)
        if BOUNDED:
            first = tl.maximum(first, tl.load(WINDOW_START + batch * w_b + token64 * w_t))
        visible = (key >= first) & (key <= token)
        in_group = (step % head_blocks) * HEADS + tl.arange(0, HEADS)
        in_use = in_group < GROUP
        head = kv_head * GROUP + in_group
        # A token of no document reads nothing: its rows may hold anything.
        reads = in_use & (first <= token)
        sound = sound_heads(LSE + plane + token64, DELTA + plane + token64, head, tokens, reads)
        q = load_heads(query + token64 * q_t, head, q_h, column, q_d, sound, D)
        do = load_heads(grad_out + token64 * do_t, head, do_h, column, do_d, sound, D)
        kept = (batch * tokens + token64) % ring
        stored = (kept * places + (key - token + window - 1)) * padded_heads
        place = stored[:, None] + head[None, :]
        mask = visible[:, None] & in_use[None, :]
        acc, exponent = add_heads(acc, exponent, P, DS, place, mask, q, do, RANGE)

    if RANGE:
        acc = acc * power_of_two(-exponent)[:, None]
    row = ((part * blocks + local).to(tl.int64) * kv_heads + kv_head) * KEYS + tl.arange(0, KEYS)
    store_columns = ROWS_OUT + (row * D)[:, None] + column[None, :]
    tl.store(store_columns, acc.to(ROWS_OUT.dtype.element_ty), mask=(column < D)[None, :])
