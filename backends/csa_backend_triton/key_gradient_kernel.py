"""Gradient of contiguous keys, without atomics: window rows and dense-compressed pool rows.

One program owns KEYS rows of ``local_kv`` (or of the pool) and walks the queries that may see
them, ROWS (token, head) pairs at a time in token-major order. With the keys as rows,

    P^T = exp(scale * K Q^T - lse)          dS^T = scale * P^T * (K dO^T - delta)
    dK = sum over blocks of P^T dO + dS^T Q              (key and value are one tensor)

Window: queries t .. t + W - 1 of key t. Dense: queries FIRST .. LAST - 1 of the block of keys.
The range of queries may be cut into parts, each a program that writes its own fp32 partial
``[parts, B, G, rows, D]``; the launcher adds them in a fixed order.
"""

import triton
import triton.language as tl

from .tiles import LOG2E, fitting_exponent, load_rows, power_of_two, store_rows


@triton.jit(do_not_specialize=["tokens", "key_rows", "window", "parts"])
def key_gradient_kernel(
    QUERY,
    KV,
    WINDOW_START,
    POOL_START,
    POOL_END,
    FIRST,
    LAST,
    GRAD_OUT,
    LSE,
    DELTA,
    GRAD_KV,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_g,
    k_r,
    w_b,
    w_t,
    ps_b,
    ps_t,
    pe_b,
    pe_t,
    do_b,
    do_h,
    do_t,
    do_d,
    tokens,
    key_rows,
    window,
    parts,
    batches,
    scale,
    DENSE: tl.constexpr,
    BOUNDED: tl.constexpr,
    RANGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    part = program % parts
    key_blocks = tl.cdiv(key_rows, KEYS)
    key_block = (program // parts) % key_blocks
    batch = (program // parts // key_blocks).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)

    key = key_block * KEYS + tl.arange(0, KEYS)
    inside = key < key_rows
    kv = KV + batch * k_b + kv_head * k_g
    k0 = load_rows(kv, key.to(tl.int64) * k_r, inside, 1, D, 0, D0)
    acc0 = tl.zeros([KEYS, D0], tl.float32)
    if D1 > 0:
        k1 = load_rows(kv, key.to(tl.int64) * k_r, inside, 1, D, D0, D1)
        acc1 = tl.zeros([KEYS, D1], tl.float32)
    # P times 2**15 still fits fp16, hence the start of the running exponent.
    exponent = tl.full([KEYS], 15, tl.int32)

    if DENSE:
        first = tl.load(FIRST + batch * key_blocks + key_block)
        last = tl.load(LAST + batch * key_blocks + key_block)
    else:
        first = key_block * KEYS
        last = tl.minimum(first + KEYS - 1 + window, tokens)
    share = tl.cdiv(tl.maximum(last - first, 0), parts)
    begin = first + part * share
    end = tl.minimum(begin + share, last)

    for at in tl.range(begin * GROUP, end * GROUP, ROWS, num_stages=STAGES):
        flat = at + tl.arange(0, ROWS)
        token = flat // GROUP
        head = kv_head * GROUP + flat % GROUP
        valid = token < end
        token64 = token.to(tl.int64)
        row = (batch * kv_heads * GROUP + head) * tokens + token64
        lse = tl.load(LSE + row, mask=valid, other=float("inf"))
        delta = tl.load(DELTA + row, mask=valid, other=0.0)
        live = valid & (lse != float("inf")) & (lse != float("-inf"))
        if DENSE:
            low = tl.load(POOL_START + batch * ps_b + token64 * ps_t, mask=valid, other=0)
            high = tl.load(POOL_END + batch * pe_b + token64 * pe_t, mask=valid, other=0)
        else:
            low = tl.maximum(token - window + 1, 0)
            high = token + 1
            if BOUNDED:
                start = tl.load(WINDOW_START + batch * w_b + token64 * w_t, mask=valid, other=0)
                low = tl.maximum(low, start)
        # A row with NaN or Inf anywhere has it in lse or delta too. It is read as 0 and put
        # back by its P, so that it reaches the keys it sees and no other key of this block.
        sound = live & (low < high) & (tl.abs(lse) < float("inf")) & (tl.abs(delta) < float("inf"))
        visible = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]) & live[None, :]

        q_row = head * q_h + token64 * q_t
        do_row = head * do_h + token64 * do_t
        q0 = load_rows(QUERY + batch * q_b, q_row, sound, q_d, D, 0, D0)
        do0 = load_rows(GRAD_OUT + batch * do_b, do_row, sound, do_d, D, 0, D0)
        s = tl.dot(k0, tl.trans(q0), input_precision="ieee")
        dp = tl.dot(k0, tl.trans(do0), input_precision="ieee")
        if D1 > 0:
            q1 = load_rows(QUERY + batch * q_b, q_row, sound, q_d, D, D0, D1)
            do1 = load_rows(GRAD_OUT + batch * do_b, do_row, sound, do_d, D, D0, D1)
            s = tl.dot(k1, tl.trans(q1), s, input_precision="ieee")
            dp = tl.dot(k1, tl.trans(do1), dp, input_precision="ieee")
        lse2 = tl.where(sound, lse * LOG2E, float("nan"))
        p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - lse2[None, :]), 0.0)
        ds = tl.where(visible, p * (dp - delta[None, :]) * scale, 0.0)
        if RANGE:
            lowered = fitting_exponent(ds, exponent)
            fade = power_of_two(lowered - exponent)[:, None]
            acc0 = acc0 * fade
            if D1 > 0:
                acc1 = acc1 * fade
            exponent = lowered
            factor = power_of_two(exponent)[:, None]
            p = p * factor
            ds = ds * factor
        p = p.to(k0.dtype)
        ds = ds.to(k0.dtype)
        acc0 = tl.dot(p, do0, acc0, input_precision="ieee")
        acc0 = tl.dot(ds, q0, acc0, input_precision="ieee")
        if D1 > 0:
            acc1 = tl.dot(p, do1, acc1, input_precision="ieee")
            acc1 = tl.dot(ds, q1, acc1, input_precision="ieee")

    if RANGE:
        restore = power_of_two(-exponent)[:, None]
        acc0 = acc0 * restore
        if D1 > 0:
            acc1 = acc1 * restore
    plane = ((part * batches + batch) * kv_heads + kv_head) * key_rows
    out_row = (plane + key) * D
    store_rows(GRAD_KV, out_row, inside, 1, acc0, D, 0, D0)
    if D1 > 0:
        store_rows(GRAD_KV, out_row, inside, 1, acc1, D, D0, D1)
