# pyright: reportGeneralTypeIssues=false
"""Backward over query tiles: delta, the query's gradient and, on request, P and dS.

One program owns ROWS query rows (see ``tiles``), walks the keys they see as the forward does
and recomputes, from the sink-inclusive lse,

    delta = rowsum(out * dO)         P = exp(scale * Q K^T - lse)
    dS = scale * P * (dO K^T - delta)                    dQ = sum over blocks of dS K

(FlashAttention-2's backward; the sink only enters through lse and delta.) It can store P and
dS of the window and of the slots for ``window_rows_kernel`` and ``slot_rows_kernel``;
``stored_scores`` says how they lie. With neither dQ nor P wanted it is the delta kernel. Rows
that see no key, or whose lse is infinite, read nothing of dO and give 0.
"""

import triton
import triton.language as tl

from .tiles import (
    DENSE,
    GATHER,
    LOG2E,
    WINDOW,
    finite_or_zero,
    fitting_exponent,
    last_used_slot,
    load_rows,
    load_slots,
    locate,
    power_of_two,
    store_rows,
    token_value,
    window_first,
)


@triton.jit
def score_gradient(
    q0,
    q1,
    do0,
    do1,
    base,
    offset,
    loaded,
    visible,
    lse2,
    delta,
    exponent,
    acc0,
    acc1,
    scale,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    CLEAN: tl.constexpr,
    NEED_QUERY: tl.constexpr,
    RANGE: tl.constexpr,
):
    """P and dS (fp32) of one block of keys, and the accumulated dQ.

    With RANGE (fp16) dS enters the product as ``dS * 2**exponent``, row by row, and acc0 and
    acc1 hold dQ times the same factor.
    """
    k0 = load_rows(base, offset, loaded, 1, D, 0, D0)
    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    dp = tl.dot(do0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        k1 = load_rows(base, offset, loaded, 1, D, D0, D1)
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
        dp = tl.dot(do1, tl.trans(k1), dp, input_precision="ieee")
    p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - lse2[:, None]), 0.0)
    ds = tl.where(visible, p * (dp - delta[:, None]) * scale, 0.0)
    if NEED_QUERY:
        fitted = ds
        if RANGE:
            lowered = fitting_exponent(ds, exponent)
            fade = power_of_two(lowered - exponent)
            acc0 = acc0 * fade[:, None]
            if D1 > 0:
                acc1 = acc1 * fade[:, None]
            exponent = lowered
            fitted = ds * power_of_two(exponent)[:, None]
        fitted = fitted.to(k0.dtype)
        if CLEAN:
            k0 = finite_or_zero(k0)
        acc0 = tl.dot(fitted, k0, acc0, input_precision="ieee")
        if D1 > 0:
            if CLEAN:
                k1 = finite_or_zero(k1)
            acc1 = tl.dot(fitted, k1, acc1, input_precision="ieee")
    return p, ds, exponent, acc0, acc1


@triton.jit
def store_scores(P, DS, head, place, p, ds, valid, inside):
    """Store P and dS of a block of keys, transposed: heads are contiguous."""
    target = head[:, None] + place[None, :]
    mask = valid[:, None] & inside[None, :]
    tl.store(P + target, p.to(P.dtype.element_ty), mask=mask)
    tl.store(DS + target, ds.to(DS.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "pool_rows", "window", "first_program", "ring", "places"])
def token_gradient_kernel(
    QUERY,
    LOCAL,
    POOL,
    INDICES,
    WINDOW_START,
    POOL_START,
    POOL_END,
    OUT,
    GRAD_OUT,
    LSE,
    DELTA,
    GRAD_QUERY,
    P,
    DS,
    USED_END,
    q_b,
    q_h,
    q_t,
    q_d,
    l_b,
    l_g,
    l_t,
    p_b,
    p_g,
    p_s,
    i_b,
    i_t,
    i_k,
    w_b,
    w_t,
    ps_b,
    ps_t,
    pe_b,
    pe_t,
    o_b,
    o_h,
    o_t,
    o_d,
    do_b,
    do_h,
    do_t,
    do_d,
    dq_b,
    dq_h,
    dq_t,
    dq_d,
    tokens,
    pool_rows,
    slots,
    window,
    first_program,
    ring,
    places,
    padded_heads,
    scale,
    KIND: tl.constexpr,
    BOUNDED: tl.constexpr,
    NEED_QUERY: tl.constexpr,
    STORE_WINDOW: tl.constexpr,
    STORE_SLOTS: tl.constexpr,
    RANGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
    SCAN: tl.constexpr,
):
    program = first_program + tl.num_programs(0) - 1 - tl.program_id(0)
    batch, token, head, valid = locate(program, tokens, GROUP, ROWS, SINGLE)
    kv_head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    batch64 = batch.to(tl.int64)
    token64 = token.to(tl.int64)
    head64 = kv_head * GROUP + head
    lane = tl.arange(0, KEYS)

    # What the rows see.
    first = window_first(WINDOW_START, w_b, w_t, batch, token, valid, window, BOUNDED, SINGLE)
    seen = first <= token
    start = 0
    stop = 0
    span = pool_rows
    if (KIND == GATHER and BOUNDED) or KIND == DENSE:
        start = token_value(POOL_START, ps_b, ps_t, batch, token, valid, SINGLE)
        stop = token_value(POOL_END, pe_b, pe_t, batch, token, valid, SINGLE)
        span = stop - start
    used_end = 0
    if KIND == GATHER:
        indices = INDICES + batch64 * i_b + token64 * i_t
        used_end = last_used_slot(indices, i_k, slots, span, SCAN)
        seen = seen | (used_end > 0)
    if KIND == DENSE:
        seen = seen | (start < stop)

    # delta, for the rows that take part.
    row = (batch64 * heads + head64) * tokens + token64
    lse = tl.load(LSE + row, mask=valid, other=float("inf"))
    live = valid & seen & (lse != float("inf")) & (lse != float("-inf"))
    do_row = head64 * do_h + token64 * do_t
    o_row = head64 * o_h + token64 * o_t
    do0 = load_rows(GRAD_OUT + batch64 * do_b, do_row, live, do_d, D, 0, D0)
    out = load_rows(OUT + batch64 * o_b, o_row, live, o_d, D, 0, D0)
    delta = tl.sum(out.to(tl.float32) * do0.to(tl.float32), 1)
    do1 = do0
    if D1 > 0:
        do1 = load_rows(GRAD_OUT + batch64 * do_b, do_row, live, do_d, D, D0, D1)
        out = load_rows(OUT + batch64 * o_b, o_row, live, o_d, D, D0, D1)
        delta += tl.sum(out.to(tl.float32) * do1.to(tl.float32), 1)
    tl.store(DELTA + row, delta, mask=valid)

    if NEED_QUERY or STORE_WINDOW or STORE_SLOTS:
        lse2 = tl.where(live, lse * LOG2E, float("inf"))
        q_row = head64 * q_h + token64 * q_t
        q0 = load_rows(QUERY + batch64 * q_b, q_row, live, q_d, D, 0, D0)
        q1 = q0
        acc0 = tl.zeros([ROWS, D0], tl.float32)
        acc1 = delta
        if D1 > 0:
            q1 = load_rows(QUERY + batch64 * q_b, q_row, live, q_d, D, D0, D1)
            acc1 = tl.zeros([ROWS, D1], tl.float32)
        exponent = tl.full([ROWS], 100, tl.int32)
        stored = ((batch64 * tokens + token64) % ring) * places * padded_heads + head64

        # One loop walks the window's blocks and then the pool's: two would each keep the
        # operands' descriptors in registers, which wide heads do not have.
        local = LOCAL + batch64 * l_b + kv_head * l_g
        begin = first
        end = token + 1
        if not SINGLE:
            begin = tl.min(tl.where(valid, first, tokens))
            end = tl.max(tl.where(valid, token, -1)) + 1
        local_blocks = 0
        if NEED_QUERY or STORE_WINDOW:
            local_blocks = tl.cdiv(tl.maximum(end - begin, 0), KEYS)
        blocks = local_blocks
        base = local
        pool_begin = 0
        pool_end = 0
        if KIND == GATHER and (NEED_QUERY or STORE_SLOTS):
            pool_end = used_end
        if KIND == DENSE and NEED_QUERY:
            pool_begin = start
            pool_end = stop
            if not SINGLE:
                pool_begin = tl.min(tl.where(valid & (start < stop), start, pool_rows))
                pool_end = tl.max(tl.where(valid & (start < stop), stop, 0))
        if KIND != WINDOW:
            pool = POOL + batch64 * p_b + kv_head * p_g
            blocks += tl.cdiv(tl.maximum(pool_end - pool_begin, 0), KEYS)

        for block in tl.range(0, blocks, num_stages=STAGES):
            in_window = block < local_blocks
            key = begin + block * KEYS + lane
            offset = key.to(tl.int64) * l_t
            loaded = key < end
            if KIND != WINDOW:
                base = tl.where(in_window, local, pool)
                place = pool_begin + (block - local_blocks) * KEYS + lane
                if KIND == GATHER:
                    inside = (place >= 0) & (place < slots)
                    pool_row, used = load_slots(indices, i_k, place, inside, span, start)
                else:
                    pool_row = place.to(tl.int64)
                    used = place < pool_end
                offset = tl.where(in_window, offset, pool_row * p_s)
                loaded = tl.where(in_window, loaded, used)
            if SINGLE:
                visible = loaded[None, :]
            else:
                row_begin = first
                row_end = token + 1
                seen_key = key
                if KIND == DENSE:
                    row_begin = tl.where(in_window, first, start)
                    row_end = tl.where(in_window, token + 1, stop)
                    seen_key = tl.where(in_window, key, place)
                visible = seen_key[None, :] >= row_begin[:, None]
                visible = visible & (seen_key[None, :] < row_end[:, None])
            p, ds, exponent, acc0, acc1 = score_gradient(
                q0, q1, do0, do1, base, offset, loaded, visible,
                lse2, delta, exponent, acc0, acc1, scale, D, D0, D1,
                not SINGLE, NEED_QUERY, RANGE,
            )  # fmt: skip
            if STORE_WINDOW or STORE_SLOTS:
                # The window's keys come first, then the slots.
                target = key - token + window - 1
                kept = key < end
                if not STORE_WINDOW:
                    target = place
                    kept = inside
                elif STORE_SLOTS:
                    target = tl.where(in_window, target, window + place)
                    kept = tl.where(in_window, kept, inside)
                else:
                    kept = kept & in_window
                target = target.to(tl.int64) * padded_heads
                store_scores(P, DS, stored, target, p, ds, valid, kept)
        if STORE_SLOTS:
            tl.store(USED_END + (batch64 * tokens + token64) % ring, used_end)

        if NEED_QUERY:
            if RANGE:
                restore = power_of_two(-exponent)
                acc0 = acc0 * restore[:, None]
                if D1 > 0:
                    acc1 = acc1 * restore[:, None]
            dq_row = head64 * dq_h + token64 * dq_t
            grad = GRAD_QUERY + batch64 * dq_b
            store_rows(grad, dq_row, valid, dq_d, acc0, D, 0, D0)
            if D1 > 0:
                store_rows(grad, dq_row, valid, dq_d, acc1, D, D0, D1)
