# pyright: reportGeneralTypeIssues=false
"""Kernels of the lightning indexer: scores of a block of tokens, then each token's picks.

``score_kernel`` owns ROWS tokens by ENTRIES entries and adds up the heads in registers, so that
global memory sees one fp32 score a pair and never a head's. ``select_kernel`` owns one token: it
finds the ``topk``-th largest score by bisection over the bits of fp32 (32 counts of a row held
in registers, however large ``topk``) and writes the picks in ascending order; among equal
scores the first entries win. Neither has atomics or an order that could vary.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
UNSEEN = tl.constexpr(-2147483648)


@triton.jit(do_not_specialize=["first_token", "rows", "pool", "topk", "heads"])
def score_kernel(
    QUERY,
    KEYS,
    WEIGHTS,
    START,
    END,
    SCORES,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_s,
    k_d,
    w_b,
    w_t,
    w_h,
    s_b,
    s_t,
    e_b,
    e_t,
    width,
    first_token,
    rows,
    pool,
    topk,
    heads,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """SCORES[batch, row, entry] of ``rows`` tokens from ``first_token`` on.

    Entries that no token of the tile sees, or whose tokens all pick whatever they see, keep what
    SCORES held: ``select_kernel`` does not look at them.
    """
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = (first_token + row).to(tl.int64)
    start = tl.load(START + batch * s_b + token * s_t, mask=inside, other=2147483647)
    end = tl.load(END + batch * e_b + token * e_t, mask=inside, other=0)
    begin = tl.program_id(1) * ENTRIES
    seen = (begin < tl.max(end)) & (begin + ENTRIES > tl.min(start))
    if seen & (tl.max(end - start) > topk):
        entry = begin + tl.arange(0, ENTRIES)
        column = tl.arange(0, COLUMNS)
        in_row = column < D
        key_places = entry.to(tl.int64)[:, None] * k_s + (column * k_d)[None, :]
        keys = tl.load(
            KEYS + batch * k_b + key_places,
            mask=(entry < pool)[:, None] & in_row[None, :],
            other=0.0,
        )
        keys = tl.trans(keys)
        query = QUERY + batch * q_b + token[:, None] * q_t + (column * q_d)[None, :]
        weight = WEIGHTS + batch * w_b + token * w_t
        scores = tl.zeros([ROWS, ENTRIES], tl.float32)
        for head in tl.range(0, heads, num_stages=STAGES):
            head64 = tl.cast(head, tl.int64)
            q = tl.load(query + head64 * q_h, mask=inside[:, None] & in_row[None, :], other=0.0)
            w = tl.load(weight + head64 * w_h, mask=inside, other=0.0).to(tl.float32)
            products = tl.dot(q, keys, input_precision="ieee")
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            scores += w[:, None] * products
        places = (batch * rows + row)[:, None] * width + entry[None, :]
        tl.store(SCORES + places, scores, mask=inside[:, None])


@triton.jit
def ordinals(SCORES, entry, end):
    """Scores as int32 of the same order; NaN and -inf lowest, below that what is not seen.

    -0.0 is 0.0: it comes of products too small for fp32.
    """
    score = tl.load(SCORES + entry, mask=entry < end, other=0.0)
    score = tl.where(score > LOWEST, score, LOWEST)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    return tl.where(entry < end, bits ^ ((bits >> 31) & 0x7FFFFFFF), UNSEEN)


@triton.jit(do_not_specialize=["first_token", "topk"])
def select_kernel(
    SCORES,
    START,
    END,
    PICKS,
    s_b,
    s_t,
    e_b,
    e_t,
    p_b,
    width,
    first_token,
    topk,
    BLOCK: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """PICKS[batch, token, :topk], from the first entry the token sees; -1 after the last.

    RESIDENT: BLOCK holds whatever a token sees. Otherwise each count reads the row again.
    """
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    token = (first_token + row).to(tl.int64)
    start = tl.load(START + batch * s_b + token * s_t)
    end = tl.load(END + batch * e_b + token * e_t)
    picks = PICKS + batch * p_b + token * topk
    lane = tl.arange(0, BLOCK)
    if end - start <= topk:
        for slot in range(0, topk, BLOCK):
            place = slot + lane
            tl.store(picks + place, tl.where(place < end - start, place, -1), mask=place < topk)
    else:
        scores = SCORES + (batch * tl.num_programs(0) + row) * width
        held = ordinals(scores, start + lane, end)
        # The largest value that at least topk entries reach, from its highest bit down.
        threshold = UNSEEN
        for step in range(32):
            bit = tl.full([], 1, tl.int32) << (31 - step)
            raised = tl.where(step == 0, 0, threshold | bit)
            if RESIDENT:
                reached = tl.sum((held >= raised).to(tl.int32))
            else:
                reached = 0
                for begin in range(start, end, BLOCK):
                    value = ordinals(scores, begin + lane, end)
                    reached += tl.sum((value >= raised).to(tl.int32))
            threshold = tl.where(reached >= topk, raised, threshold)
        above = 0
        for begin in range(start, end, BLOCK):
            value = held if RESIDENT else ordinals(scores, begin + lane, end)
            above += tl.sum((value > threshold).to(tl.int32))
        ties = topk - above
        taken = 0
        for begin in range(start, end, BLOCK):
            value = held if RESIDENT else ordinals(scores, begin + lane, end)
            equal = (value == threshold).to(tl.int32)
            first = equal * (tl.cumsum(equal) <= ties).to(tl.int32)
            picked = (value > threshold).to(tl.int32) + first
            place = taken + tl.cumsum(picked) - 1
            tl.store(picks + place, begin + lane - start, mask=picked > 0)
            taken += tl.sum(picked)
            ties -= tl.sum(first)
