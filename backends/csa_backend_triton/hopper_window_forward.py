# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Hopper forward of window-only calls, head_dim 512: a run of tokens against keys that stay.

One program computes [64 heads x 512] of the output per item, for the items of consecutive tokens.
All of a token's keys K are in shared memory at once (``hopper_window_keys``), so the softmax
needs one pass and O no accumulator that lasts: with Q [64, 512],

    S = scale log2e Q K^T      m = rowmax S      P = exp2(S - m)      l = rowsum P
    out[:, c] = P K[:, c] / (l + exp2(sink log2e - m))                in column tiles c of 64
    lse = m / log2e + log(l + exp2(sink log2e - m))

with P in registers. Four warpgroups, synchronised by mbarriers alone: three consumers, which take
the items in turn, one's scores running beside the others' softmax and output, and one that copies
keys and queries (``hopper_window_tiles``).
"""

from .gluon_compat import gl, gluon, warpgroup_mma_wait
from .hopper_tiles import Rows
from .hopper_window_keys import (
    COLUMNS,
    EXTRA,
    TILES,
    WINDOW,
    Run,
    allocate_ring,
    begin_keys,
    more_keys,
    visible,
)
from .hopper_window_tiles import (
    EXTRA_SCORES,
    HALF,
    HEADS,
    OUTPUT,
    QUARTER,
    QUARTER_ROWS,
    SCORES,
    VALUES,
    WEIGHTS,
    add_scores,
    allocate_tiles,
    fetch,
    weighted_keys,
)

CONSUMERS = gl.constexpr(3)
LOWEST = gl.constexpr(-3.4e38)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _copy(run, ring, tiles, query, local):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUARTER_ROWS))
    column = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, QUARTER_ROWS))
    fetch(run, query, 0)
    begin_keys(run, ring, local)
    for i in range(run.items()):
        flat, first_head = run.item(i)
        head = first_head + offs_h
        source = run.rows_of(query, flat, head, column)
        fetch(run, query, i + 1)
        for part in gl.static_range(2):
            tiles.fill(2 * i + part, source + part * HALF, (head < run.heads)[:, None])
        more_keys(run, ring, local, i)


@gluon.jit
def _scores(ring, tiles, i, zero, CONSUMER: gl.constexpr):
    """Q K^T of item ``i``, ``[64, 128]`` and ``[64, 16]``."""
    s = gl.zeros([HEADS, WINDOW], gl.float32, layout=SCORES)
    extra = gl.zeros([HEADS, EXTRA], gl.float32, layout=EXTRA_SCORES)
    tiles.take_turn(i, CONSUMER)
    s, extra = add_scores(tiles.wait(2 * i), ring, zero, s, extra, 0)
    s, extra = warpgroup_mma_wait(0, deps=[s, extra])
    tiles.give_back(2 * i)
    q = tiles.wait(2 * i + 1)
    tiles.pass_turn(CONSUMER)
    s, extra = add_scores(q, ring, zero, s, extra, 1)
    s, extra = warpgroup_mma_wait(0, deps=[s, extra])
    tiles.give_back(2 * i + 1)
    return s, extra


@gluon.jit
def _consume(run, ring, tiles, out, SINK, LSE, scale_log2, CONSUMER: gl.constexpr):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    slot = gl.arange(0, WINDOW, layout=gl.SliceLayout(0, SCORES))
    extra_slot = WINDOW + gl.arange(0, EXTRA, layout=gl.SliceLayout(0, EXTRA_SCORES))
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUTPUT))
    if CONSUMER < 2:
        ring.check(CONSUMER)
    for i in range(CONSUMER, run.items(), CONSUMERS):
        flat, first_head = run.item(i)
        window_rows = run.window_rows(flat)
        head = first_head + offs_h
        live = head < run.heads
        if SINK is None:
            sink = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        else:
            sink = gl.load(SINK + head, mask=live, other=0.0).to(gl.float32)
        ring.wait(i // (8 * run.head_blocks))
        # A run-time zero: without it ptxas hoists every tile's descriptors and spills them.
        zero = i >> 28
        s, extra = _scores(ring, tiles, i, zero, CONSUMER)
        marks, extra_marks = ring.marks_of(
            gl.SliceLayout(0, SCORES), gl.SliceLayout(0, EXTRA_SCORES)
        )
        seen = visible(flat, window_rows, slot)[None, :]
        extra_seen = visible(flat, window_rows, extra_slot)[None, :]
        s = gl.where(seen, s * scale_log2 + marks[None, :], float("-inf"))
        extra = gl.where(extra_seen, extra * scale_log2 + extra_marks[None, :], float("-inf"))
        m = gl.convert_layout(gl.max(extra, 1), gl.SliceLayout(1, SCORES))
        m = gl.maximum(gl.maximum(gl.max(s, 1), m), LOWEST)
        p = gl.exp2(s - m[:, None])
        extra_m = gl.convert_layout(m, gl.SliceLayout(1, EXTRA_SCORES))
        extra_p = gl.exp2(extra - extra_m[:, None])
        total = gl.convert_layout(gl.sum(extra_p, 1), gl.SliceLayout(1, SCORES)) + gl.sum(p, 1)
        weights = gl.convert_layout(p.to(ring.main.dtype), WEIGHTS)
        extra_weights = gl.convert_layout(extra_p.to(ring.main.dtype), WEIGHTS)
        o = weighted_keys(weights, extra_weights, ring, zero)

        empty = window_rows == 0
        m_end = gl.maximum(m, sink * LOG2E)
        sink_dominates = m_end > m
        share = gl.exp2(m - m_end)
        total = total * share + gl.where(sink_dominates, 1.0, gl.exp2(sink * LOG2E - m))
        # In natural units from the start, so that a dominating sink comes back unrounded.
        lse = gl.where(sink_dominates, sink, m * LN2) + gl.log2(total) * LN2
        gl.store(LSE + run.statistic(flat, head), gl.where(empty, sink, lse), mask=live)
        # The total of a row without keys may be 0.
        factor = gl.convert_layout(gl.where(empty, 0.0, share / total), gl.SliceLayout(1, VALUES))

        head = first_head + row
        target = run.rows_of(out, flat, head, column)
        for c in gl.static_range(TILES):
            done = warpgroup_mma_wait(0, deps=[o])
            if c + 1 < TILES:
                o = weighted_keys(weights, extra_weights, ring, c + 1 + zero)
            else:
                ring.release(run, i, CONSUMER)
            done = gl.convert_layout(
                (done * factor[:, None]).to(out.pointer.dtype.element_ty), OUTPUT
            )
            gl.store(target + c * COLUMNS, done, mask=(head < run.heads)[:, None])


STRIDES = tuple(f"{name}_{dim}" for name in ("query", "local", "out") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "rows", "window", "run_tokens")


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES))
def window_forward_kernel(
    Q,
    query_b,
    query_h,
    query_t,
    LOCAL,
    local_b,
    local_h,
    local_t,
    OUT,
    out_b,
    out_h,
    out_t,
    START,
    start_b,
    start_t,
    heads,
    tokens,
    rows,
    window,
    run_tokens,
    SINK,
    LSE,
    scale_log2,
    CONSUMER_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Strides of query, KV and out are in units of 8 elements; ``run_tokens`` is 8 n."""
    ring = allocate_ring(Q.dtype.element_ty, CONSUMERS)
    tiles = allocate_tiles(Q.dtype.element_ty, CONSUMERS)
    first = gl.program_id(0) * run_tokens
    end = gl.minimum(first + run_tokens, rows)
    run = Run(START, start_b, start_t, heads, (heads + 63) // 64, tokens, rows, window, first, end)
    query = Rows(Q, query_b, query_h, query_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    out = Rows(OUT, out_b, out_h, out_t)
    gl.warp_specialize(
        [
            (_consume, (run, ring, tiles, out, SINK, LSE, scale_log2, gl.constexpr(0))),
            (_consume, (run, ring, tiles, out, SINK, LSE, scale_log2, gl.constexpr(1))),
            (_consume, (run, ring, tiles, out, SINK, LSE, scale_log2, gl.constexpr(2))),
            (_copy, (run, ring, tiles, query, local)),
        ],
        [4, 4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, COPY_REGISTERS],
    )
