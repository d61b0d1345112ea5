# pyright: reportGeneralTypeIssues=false
"""Forward kernel: output and lse of one tile of query rows.

One program owns ROWS rows (see ``tiles``) of one KV head and walks the keys they see in blocks
of KEYS rows, first the window, then the selected or dense pool rows, with online softmax:

    s = scale * Q K^T        m' = max(m, rowmax s)       p = exp(s - m')
    l = l * exp(m - m') + rowsum p                       acc = acc * exp(m - m') + p K

and closes with the sink: out = acc / (l + exp(sink - m)), lse = log(exp(m) l + exp(sink)).
Logits are kept in base 2. The head dimension is split in two parts, D0 + D1 columns, each a
power of two, so that 576 costs 512 + 64 and not 1024; D1 may be 0.
"""

import triton
import triton.language as tl

from .tiles import (
    DENSE,
    GATHER,
    LN2,
    LOG2E,
    LOWEST,
    finite_or_zero,
    last_used_slot,
    load_rows,
    load_slots,
    locate,
    store_rows,
    token_value,
    window_first,
)


@triton.jit
def attend(
    q0,
    q1,
    base,
    offset,
    loaded,
    visible,
    m,
    total,
    acc0,
    acc1,
    scale_log2,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """One block of keys: rows at ``base + offset``, read where ``loaded``.

    With CLEAN, a key that is not visible to every row that shares the tile has its NaN and Inf
    removed from the value product; rows that do see it get NaN through the score.
    """
    k0 = load_rows(base, offset, loaded, 1, D, 0, D0)
    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        k1 = load_rows(base, offset, loaded, 1, D, D0, D1)
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
    s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    fade = tl.exp2(m - m_new)
    total = total * fade + tl.sum(p, 1)
    p = p.to(k0.dtype)
    if CLEAN:
        k0 = finite_or_zero(k0)
    acc0 = tl.dot(p, k0, acc0 * fade[:, None], input_precision="ieee")
    if D1 > 0:
        if CLEAN:
            k1 = finite_or_zero(k1)
        acc1 = tl.dot(p, k1, acc1 * fade[:, None], input_precision="ieee")
    return m_new, total, acc0, acc1


@triton.jit(do_not_specialize=["tokens", "pool_rows", "window"])
def forward_kernel(
    QUERY,
    LOCAL,
    POOL,
    INDICES,
    SINK,
    WINDOW_START,
    POOL_START,
    POOL_END,
    OUT,
    LSE,
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
    s_h,
    tokens,
    pool_rows,
    slots,
    window,
    scale_log2,
    KIND: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_SINK: tl.constexpr,
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
    # Last tokens first: under a causal selection they have the most keys.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, token, head, valid = locate(program, tokens, GROUP, ROWS, SINGLE)
    kv_head = tl.program_id(1).to(tl.int64)
    batch64 = batch.to(tl.int64)
    token64 = token.to(tl.int64)
    head64 = kv_head * GROUP + head

    q_row = head64 * q_h + token64 * q_t
    q0 = load_rows(QUERY + batch64 * q_b, q_row, valid, q_d, D, 0, D0)
    q1 = q0
    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = total
    if D1 > 0:
        q1 = load_rows(QUERY + batch64 * q_b, q_row, valid, q_d, D, D0, D1)
        acc1 = tl.zeros([ROWS, D1], tl.float32)
    lane = tl.arange(0, KEYS)

    first = window_first(WINDOW_START, w_b, w_t, batch, token, valid, window, BOUNDED, SINGLE)
    local = LOCAL + batch64 * l_b + kv_head * l_g
    if SINGLE:
        begin = first
        end = token + 1
    else:
        begin = tl.min(tl.where(valid, first, tokens))
        end = tl.max(tl.where(valid, token, -1)) + 1
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = at + lane
        loaded = key < end
        visible = loaded[None, :]
        if not SINGLE:
            visible = (key[None, :] >= first[:, None]) & (key[None, :] <= token[:, None])
        m, total, acc0, acc1 = attend(
            q0, q1, local, key.to(tl.int64) * l_t, loaded, visible,
            m, total, acc0, acc1, scale_log2, D, D0, D1, not SINGLE,
        )  # fmt: skip

    if KIND == GATHER:
        start = 0
        span = pool_rows
        if BOUNDED:
            start = token_value(POOL_START, ps_b, ps_t, batch, token, valid, SINGLE)
            span = token_value(POOL_END, pe_b, pe_t, batch, token, valid, SINGLE) - start
        indices = INDICES + batch64 * i_b + token64 * i_t
        pool = POOL + batch64 * p_b + kv_head * p_g
        used_end = last_used_slot(indices, i_k, slots, span, SCAN)
        for at in tl.range(0, used_end, KEYS, num_stages=STAGES):
            slot = at + lane
            row, used = load_slots(indices, i_k, slot, slot < slots, span, start)
            m, total, acc0, acc1 = attend(
                q0, q1, pool, row * p_s, used, used[None, :],
                m, total, acc0, acc1, scale_log2, D, D0, D1, False,
            )  # fmt: skip

    if KIND == DENSE:
        start = token_value(POOL_START, ps_b, ps_t, batch, token, valid, SINGLE)
        stop = token_value(POOL_END, pe_b, pe_t, batch, token, valid, SINGLE)
        pool = POOL + batch64 * p_b + kv_head * p_g
        if SINGLE:
            begin = start
            end = stop
        else:
            begin = tl.min(tl.where(valid & (start < stop), start, pool_rows))
            end = tl.max(tl.where(valid & (start < stop), stop, 0))
        for at in tl.range(begin, end, KEYS, num_stages=STAGES):
            key = at + lane
            loaded = key < end
            visible = loaded[None, :]
            if not SINGLE:
                visible = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
            m, total, acc0, acc1 = attend(
                q0, q1, pool, key.to(tl.int64) * p_s, loaded, visible,
                m, total, acc0, acc1, scale_log2, D, D0, D1, not SINGLE,
            )  # fmt: skip

    if HAS_SINK:
        sink = tl.load(SINK + head64 * s_h, mask=valid, other=0.0).to(tl.float32)
    else:
        sink = tl.full([ROWS], float("-inf"), tl.float32)
    m = m * LN2
    top = tl.maximum(m, sink)
    kept = tl.where(m == top, 1.0, tl.exp2((m - top) * LOG2E))
    denominator = total * kept + tl.where(sink == top, 1.0, tl.exp2((sink - top) * LOG2E))
    empty = total == 0.0
    lse = tl.where(empty, sink, top + tl.log(denominator))
    weight = tl.where(empty, 0.0, kept / denominator)
    heads = tl.num_programs(1) * GROUP
    tl.store(LSE + (batch64 * heads + head64) * tokens + token64, lse, mask=valid)
    o_row = head64 * o_h + token64 * o_t
    store_rows(OUT + batch64 * o_b, o_row, valid, o_d, acc0 * weight[:, None], D, 0, D0)
    if D1 > 0:
        store_rows(OUT + batch64 * o_b, o_row, valid, o_d, acc1 * weight[:, None], D, D0, D1)
