# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Hopper backward of window-only calls, head_dim 512: dQ, delta, and P and dS for the keys.

One program computes dQ [64 heads x 512] per item, for the items of consecutive tokens, all of a
token's keys K being in shared memory (``hopper_window_keys``). With Q and dO [64, 512]:

    P  = exp2(scale log2e Q K^T - lse)      dP = dO K^T      delta = rowsum(P dP)
    dS = scale P (dP - delta)               dQ[:, c] = dS K[:, c]       in column tiles c of 64

The sink's value is 0, so rowsum(P dP) is rowsum(out dO), and ``out`` need not be read. P and dS
are written in bf16 as ``hopper_window_key_gradient`` reads them: by slot of the ring of keys,
``[token, head block, 64, 128]`` and, transposed, ``[token, head block, 16, 64]``.

Three warpgroups, synchronised by mbarriers alone: two consumers, which take the items in turn, and
one that copies keys, queries and upstream gradients (``hopper_window_tiles``).
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
    WEIGHTS,
    Stored,
    add_scores,
    allocate_tiles,
    fetch,
    weighted_keys,
)

CONSUMERS = gl.constexpr(2)
LOG2E = gl.constexpr(1.4426950408889634)
# As OUTPUT, for 128 slots, and for 16 slots by 8 heads a lane.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
EXTRA_STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0]],
        lane_bases=[[8, 0], [16, 0], [32, 0], [0, 1], [0, 2]],
        warp_bases=[[0, 4], [0, 8]],
        block_bases=[],
        shape=[64, 16],
    )
)


@gluon.jit
def _copy(run, ring, tiles, query, upstream, local):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUARTER_ROWS))
    column = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, QUARTER_ROWS))
    fetch(run, query, 0)
    fetch(run, upstream, 0)
    begin_keys(run, ring, local)
    for i in range(run.items()):
        fetch(run, query, i + 1)
        fetch(run, upstream, i + 1)
        flat, first_head = run.item(i)
        head = first_head + offs_h
        q = run.rows_of(query, flat, head, column)
        do = run.rows_of(upstream, flat, head, column)
        live = (head < run.heads)[:, None]
        for part in gl.static_range(2):
            tiles.fill(4 * i + 2 * part, q + part * HALF, live)
            tiles.fill(4 * i + 2 * part + 1, do + part * HALF, live)
        more_keys(run, ring, local, i)


@gluon.jit
def _products(ring, tiles, i, zero, CONSUMER: gl.constexpr):
    """Q K^T and dO K^T of item ``i``, each ``[64, 128]`` and ``[64, 16]``."""
    s = gl.zeros([HEADS, WINDOW], gl.float32, layout=SCORES)
    dp = gl.zeros([HEADS, WINDOW], gl.float32, layout=SCORES)
    extra_s = gl.zeros([HEADS, EXTRA], gl.float32, layout=EXTRA_SCORES)
    extra_dp = gl.zeros([HEADS, EXTRA], gl.float32, layout=EXTRA_SCORES)
    unit = 4 * i
    tiles.take_turn(i, CONSUMER)
    s, extra_s = add_scores(tiles.wait(unit), ring, zero, s, extra_s, 0)
    dp, extra_dp = add_scores(tiles.wait(unit + 1), ring, zero, dp, extra_dp, 0)
    s, extra_s, dp, extra_dp = warpgroup_mma_wait(8, deps=[s, extra_s, dp, extra_dp])
    tiles.give_back(unit)
    s, extra_s, dp, extra_dp = warpgroup_mma_wait(0, deps=[s, extra_s, dp, extra_dp])
    tiles.give_back(unit + 1)
    s, extra_s = add_scores(tiles.wait(unit + 2), ring, zero, s, extra_s, 1)
    do = tiles.wait(unit + 3)
    tiles.pass_turn(CONSUMER)
    dp, extra_dp = add_scores(do, ring, zero, dp, extra_dp, 1)
    s, extra_s, dp, extra_dp = warpgroup_mma_wait(8, deps=[s, extra_s, dp, extra_dp])
    tiles.give_back(unit + 2)
    s, extra_s, dp, extra_dp = warpgroup_mma_wait(0, deps=[s, extra_s, dp, extra_dp])
    tiles.give_back(unit + 3)
    return s, extra_s, dp, extra_dp


@gluon.jit
def _store_scores(scores, extra, STORE, EXTRA_STORE, place):
    """Write one item's P or dS."""
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, STORED))
    slot = gl.arange(0, WINDOW, layout=gl.SliceLayout(0, STORED))
    target = STORE + place * (HEADS * WINDOW)
    gl.store(target + (row * WINDOW)[:, None] + slot[None, :], gl.convert_layout(scores, STORED))
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, EXTRA_STORED))
    slot = gl.arange(0, EXTRA, layout=gl.SliceLayout(0, EXTRA_STORED))
    target = EXTRA_STORE + place * (HEADS * EXTRA)
    extra = gl.convert_layout(extra, EXTRA_STORED)
    gl.store(target + row[:, None] + (slot * HEADS)[None, :], extra)


@gluon.jit
def _consume(
    run,
    ring,
    tiles,
    gradient,
    LSE,
    DELTA,
    stored,
    scale,
    scale_log2,
    QUERY_GRADIENT: gl.constexpr,
    KEY_GRADIENT: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    dtype: gl.constexpr = ring.main.dtype
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    slot = gl.arange(0, WINDOW, layout=gl.SliceLayout(0, SCORES))
    extra_slot = WINDOW + gl.arange(0, EXTRA, layout=gl.SliceLayout(0, EXTRA_SCORES))
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUTPUT))
    ring.check(CONSUMER)
    for i in range(CONSUMER, run.items(), CONSUMERS):
        flat, first_head = run.item(i)
        window_rows = run.window_rows(flat)
        head = first_head + offs_h
        live = head < run.heads
        statistic = run.statistic(flat, head)
        # Rows past the last head get P = 0.
        lse = gl.load(LSE + statistic, mask=live, other=float("inf")) * LOG2E
        ring.wait(i // (8 * run.head_blocks))
        # A run-time zero: without it ptxas hoists every tile's descriptors and spills them.
        zero = i >> 28
        s, extra_s, dp, extra_dp = _products(ring, tiles, i, zero, CONSUMER)
        marks, extra_marks = ring.marks_of(
            gl.SliceLayout(0, SCORES), gl.SliceLayout(0, EXTRA_SCORES)
        )
        seen = visible(flat, window_rows, slot)[None, :]
        extra_seen = visible(flat, window_rows, extra_slot)[None, :]
        extra_lse = gl.convert_layout(lse, gl.SliceLayout(1, EXTRA_SCORES))
        s = s * scale_log2 + marks[None, :] - lse[:, None]
        extra_s = extra_s * scale_log2 + extra_marks[None, :] - extra_lse[:, None]
        p = gl.where(seen, gl.exp2(s), 0.0)
        extra_p = gl.where(extra_seen, gl.exp2(extra_s), 0.0)
        # Unseen slots' dP may be NaN, if dO is.
        delta = gl.sum(gl.where(seen, p * dp, 0.0), 1)
        extra_delta = gl.sum(gl.where(extra_seen, extra_p * extra_dp, 0.0), 1)
        delta += gl.convert_layout(extra_delta, gl.SliceLayout(1, SCORES))
        extra_delta = gl.convert_layout(delta, gl.SliceLayout(1, EXTRA_SCORES))
        ds = gl.where(seen, p * (dp - delta[:, None]) * scale, 0.0).to(dtype)
        extra_ds = extra_p * (extra_dp - extra_delta[:, None]) * scale
        extra_ds = gl.where(extra_seen, extra_ds, 0.0).to(dtype)
        gl.store(DELTA + statistic, delta, mask=live)
        weights = gl.convert_layout(ds, WEIGHTS)
        extra_weights = gl.convert_layout(extra_ds, WEIGHTS)
        if QUERY_GRADIENT:
            dq = weighted_keys(weights, extra_weights, ring, zero)
        if KEY_GRADIENT:
            place = stored.place(run, flat, first_head)
            _store_scores(p.to(dtype), extra_p.to(dtype), stored.p, stored.extra_p, place)
            _store_scores(ds, extra_ds, stored.ds, stored.extra_ds, place)
        if QUERY_GRADIENT:
            head = first_head + row
            target = run.rows_of(gradient, flat, head, column)
            for c in gl.static_range(TILES):
                done = warpgroup_mma_wait(0, deps=[dq])
                if c + 1 < TILES:
                    dq = weighted_keys(weights, extra_weights, ring, c + 1 + zero)
                else:
                    ring.release(run, i, CONSUMER)
                done = gl.convert_layout(done.to(gradient.pointer.dtype.element_ty), OUTPUT)
                gl.store(target + c * COLUMNS, done, mask=(head < run.heads)[:, None])
        else:
            ring.release(run, i, CONSUMER)


STRIDES = tuple(f"{x}_{dim}" for x in ("query", "do", "local", "dq") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "rows", "window", "run_tokens")
CHUNK = ("chunk_first", "chunk_end")


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES, *CHUNK))
def window_backward_kernel(
    Q,
    query_b,
    query_h,
    query_t,
    DO,
    do_b,
    do_h,
    do_t,
    LOCAL,
    local_b,
    local_h,
    local_t,
    DQ,
    dq_b,
    dq_h,
    dq_t,
    START,
    start_b,
    start_t,
    heads,
    tokens,
    rows,
    window,
    run_tokens,
    chunk_first,
    chunk_end,
    LSE,
    DELTA,
    P,
    EXTRA_P,
    DS,
    EXTRA_DS,
    scale,
    scale_log2,
    QUERY_GRADIENT: gl.constexpr,
    KEY_GRADIENT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """The tokens ``chunk_first .. chunk_end - 1``; P and dS are of these tokens alone.

    Strides of query, dO, KV and dQ are in units of 8 elements; ``run_tokens`` and ``chunk_first``
    are multiples of 8.
    """
    ring = allocate_ring(Q.dtype.element_ty, CONSUMERS)
    tiles = allocate_tiles(Q.dtype.element_ty, CONSUMERS)
    first = chunk_first + gl.program_id(0) * run_tokens
    end = gl.minimum(first + run_tokens, chunk_end)
    head_blocks = (heads + 63) // 64
    run = Run(START, start_b, start_t, heads, head_blocks, tokens, rows, window, first, end)
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    gradient = Rows(DQ, dq_b, dq_h, dq_t)
    stored = Stored(P, EXTRA_P, DS, EXTRA_DS, chunk_first)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    run,
                    ring,
                    tiles,
                    gradient,
                    LSE,
                    DELTA,
                    stored,
                    scale,
                    scale_log2,
                    QUERY_GRADIENT,
                    KEY_GRADIENT,
                    gl.constexpr(0),
                ),
            ),
            (
                _consume,
                (
                    run,
                    ring,
                    tiles,
                    gradient,
                    LSE,
                    DELTA,
                    stored,
                    scale,
                    scale_log2,
                    QUERY_GRADIENT,
                    KEY_GRADIENT,
                    gl.constexpr(1),
                ),
            ),
            (_copy, (run, ring, tiles, query, upstream, local)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, COPY_REGISTERS],
    )
