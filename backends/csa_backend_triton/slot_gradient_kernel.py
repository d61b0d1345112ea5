"""Gradient of the selected pool rows of one token, the heads summed before anything is written.

One program owns one token, one KV head and COLUMNS columns, and walks the used slots in blocks
of SLOTS, from the P and dS that ``token_gradient_kernel`` stored:

    rows = P^T dO + dS^T Q        [SLOTS, COLUMNS], contracted over the group's heads

ATOMIC adds each used slot's row to an fp32 buffer ``[B, G, S, D]``; otherwise the rows are
stored, ``[tokens of the chunk, G, slots padded, D]``, for ``row_sum_kernel``.
"""

import triton
import triton.language as tl

from .tiles import fitting_exponent, load_slots, power_of_two, token_value


@triton.jit
def load_heads(base, head, stride_h, column, stride_d, valid, D: tl.constexpr):
    """``[heads, columns]`` of one token's rows; 0 where a head or column is not valid."""
    place = base + (head * stride_h)[:, None] + (column * stride_d)[None, :]
    return tl.load(place, mask=valid[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def live_heads(LSE, first_head, in_group, tokens, GROUP: tl.constexpr):
    """Heads of the group whose row takes part: its lse is not infinite."""
    lse = tl.load(
        LSE + (first_head + in_group) * tokens, mask=in_group < GROUP, other=float("inf")
    )
    return (lse != float("inf")) & (lse != float("-inf"))


@triton.jit
def add_heads(acc, exponent, p, ds, q, do, RANGE: tl.constexpr):
    """Add ``P^T dO + dS^T Q`` of one block of heads to ``acc`` (all times ``2**exponent``)."""
    p = tl.trans(p)
    ds = tl.trans(ds)
    if RANGE:
        lowered = fitting_exponent(ds, exponent)
        acc = acc * power_of_two(lowered - exponent)[:, None]
        exponent = lowered
        factor = power_of_two(exponent)[:, None]
        p = p * factor
        ds = ds * factor
    acc = tl.dot(p.to(do.dtype), do, acc, input_precision="ieee")
    acc = tl.dot(ds.to(q.dtype), q, acc, input_precision="ieee")
    return acc, exponent


@triton.jit(do_not_specialize=["tokens", "pool_rows", "slots", "first_token"])
def slot_gradient_kernel(
    QUERY,
    INDICES,
    POOL_START,
    POOL_END,
    GRAD_OUT,
    LSE,
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
    padded_slots,
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
    used_end = tl.load(USED_END + local)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, SLOTS)
    stored = local.to(tl.int64) * kv_heads * GROUP * padded_slots
    query = QUERY + batch * q_b + token * q_t
    grad_out = GRAD_OUT + batch * do_b + token * do_t
    first_head = kv_head * GROUP
    lse = LSE + batch * kv_heads * GROUP * tokens + token
    if GROUP <= HEADS:
        in_group = tl.arange(0, HEADS)
        head = first_head + in_group
        valid = live_heads(lse, first_head, in_group, tokens, GROUP)
        q = load_heads(query, head, q_h, column, q_d, valid, D)
        do = load_heads(grad_out, head, do_h, column, do_d, valid, D)

    for at in tl.range(0, used_end, SLOTS, num_stages=STAGES):
        acc = tl.zeros([SLOTS, COLUMNS], tl.float32)
        # P times 2**15 still fits fp16, hence the start of the running exponent.
        exponent = tl.full([SLOTS], 15, tl.int32)
        if GROUP <= HEADS:
            place = stored + (head * padded_slots)[:, None] + (at + lane)[None, :]
            p = tl.load(P + place, mask=valid[:, None], other=0.0)
            ds = tl.load(DS + place, mask=valid[:, None], other=0.0)
            acc, exponent = add_heads(acc, exponent, p, ds, q, do, RANGE)
        else:
            for block in tl.static_range(0, GROUP, HEADS):
                in_group = block + tl.arange(0, HEADS)
                head = first_head + in_group
                valid = live_heads(lse, first_head, in_group, tokens, GROUP)
                q = load_heads(query, head, q_h, column, q_d, valid, D)
                do = load_heads(grad_out, head, do_h, column, do_d, valid, D)
                place = stored + (head * padded_slots)[:, None] + (at + lane)[None, :]
                p = tl.load(P + place, mask=valid[:, None], other=0.0)
                ds = tl.load(DS + place, mask=valid[:, None], other=0.0)
                acc, exponent = add_heads(acc, exponent, p, ds, q, do, RANGE)
        if RANGE:
            acc = acc * power_of_two(-exponent)[:, None]

        row, used = load_slots(indices, i_k, at + lane, slots, span, start)
        writes = used[:, None]
        if D % COLUMNS != 0:
            writes = writes & (column < D)[None, :]
        if ATOMIC:
            plane = (batch * kv_heads + kv_head) * pool_rows
            target = (plane + tl.where(used, row, 0)) * D
            place = ROWS_OUT + target[:, None] + column[None, :]
            tl.atomic_add(place, acc, mask=writes, sem="relaxed")
        else:
            target = ((local.to(tl.int64) * kv_heads + kv_head) * padded_slots + at + lane) * D
            place = ROWS_OUT + target[:, None] + column[None, :]
            tl.store(place, acc.to(ROWS_OUT.dtype.element_ty), mask=writes)
