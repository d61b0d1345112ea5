# pyright: reportGeneralTypeIssues=false
"""Gradient of the selected pool rows of one token, the heads summed before anything is written.

One program owns one token, one KV head and COLUMNS columns, and walks the used slots in blocks
of SLOTS, from the P and dS that ``token_gradient_kernel`` stored:

    rows = P^T dO + dS^T Q        [SLOTS, COLUMNS], contracted over the group's heads

ATOMIC adds each used slot's row to an fp32 buffer ``[B, G, S, D]``; otherwise the rows are
stored, ``[tokens of the chunk, G, K, D]``, for ``row_sum_kernel``.
"""

import triton
import triton.language as tl

from .head_sums import add_heads, load_heads, sound_heads
from .tiles import load_slots, power_of_two, token_value


@triton.jit(do_not_specialize=["tokens", "pool_rows", "first_token", "ring", "places", "skipped"])
def slot_rows_kernel(
    QUERY,
    INDICES,
    POOL_START,
    POOL_END,
    GRAD_OUT,
    LSE,
    DELTA,
    P,
    DS,
    USED_END,
    ROWS_OUT,
    q_b,
    q_h,
    q_t,
    q_d,
    i_b,
    i_t,
    i_k,
    ps_b,
    ps_t,
    pe_b,
    pe_t,
    do_b,
    do_h,
    do_t,
    do_d,
    tokens,
    pool_rows,
    slots,
    first_token,
    ring,
    places,
    skipped,
    padded_heads,
    BOUNDED: tl.constexpr,
    ATOMIC: tl.constexpr,
    RANGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    pieces: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    local = program // pieces
    piece = program % pieces
    flat = first_token + local
    batch = (flat // tokens).to(tl.int64)
    token = (flat % tokens).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)

    start = 0
    span = pool_rows
    if BOUNDED:
        start = token_value(POOL_START, ps_b, ps_t, batch, token, True, True)
        span = token_value(POOL_END, pe_b, pe_t, batch, token, True, True) - start
    indices = INDICES + batch * i_b + token * i_t
    kept = (flat % ring).to(tl.int64)
    used_end = tl.load(USED_END + kept)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, SLOTS)
    stored = (kept * places + skipped) * padded_heads
    query = QUERY + batch * q_b + token * q_t
    grad_out = GRAD_OUT + batch * do_b + token * do_t
    lse = LSE + batch * kv_heads * GROUP * tokens + token
    delta = DELTA + batch * kv_heads * GROUP * tokens + token
    if GROUP <= HEADS:
        in_group = tl.arange(0, HEADS)
        valid = in_group < GROUP
        head = kv_head * GROUP + in_group
        sound = sound_heads(lse, delta, head, tokens, valid)
        q = load_heads(query, head, q_h, column, q_d, sound, D)
        do = load_heads(grad_out, head, do_h, column, do_d, sound, D)

    for at in tl.range(0, used_end, SLOTS, num_stages=STAGES):
        slot = at + lane
        row, used = load_slots(indices, i_k, slot, slot < slots, span, start)
        slot_place = stored + (at + lane).to(tl.int64) * padded_heads
        acc = tl.zeros([SLOTS, COLUMNS], tl.float32)
        # P times 2**15 still fits fp16, hence the start of the running exponent.
        exponent = tl.full([SLOTS], 15, tl.int32)
        if GROUP <= HEADS:
            place = slot_place[:, None] + head[None, :]
            mask = used[:, None] & valid[None, :]
            acc, exponent = add_heads(acc, exponent, P, DS, place, mask, q, do, RANGE)
        else:
            for block in tl.static_range(0, GROUP, HEADS):
                in_group = block + tl.arange(0, HEADS)
                valid = in_group < GROUP
                head = kv_head * GROUP + in_group
                sound = sound_heads(lse, delta, head, tokens, valid)
                q = load_heads(query, head, q_h, column, q_d, sound, D)
                do = load_heads(grad_out, head, do_h, column, do_d, sound, D)
                place = slot_place[:, None] + head[None, :]
                mask = used[:, None] & valid[None, :]
                acc, exponent = add_heads(acc, exponent, P, DS, place, mask, q, do, RANGE)
        if RANGE:
            acc = acc * power_of_two(-exponent)[:, None]

        writes = used[:, None]
        if D % COLUMNS != 0:
            writes = writes & (column < D)[None, :]
        if ATOMIC:
            plane = (batch * kv_heads + kv_head) * pool_rows
            target = (plane + tl.where(used, row, 0)) * D
            tl.atomic_add(
                ROWS_OUT + target[:, None] + column[None, :], acc, mask=writes, sem="relaxed"
            )
        else:
            target = ((local.to(tl.int64) * kv_heads + kv_head) * slots + at + lane) * D
            place = ROWS_OUT + target[:, None] + column[None, :]
            tl.store(place, acc.to(ROWS_OUT.dtype.element_ty), mask=writes)
