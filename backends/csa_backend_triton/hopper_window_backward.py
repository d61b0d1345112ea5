# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper backward of window-only calls, head_dim 512: dQ, delta, and P and dS for the keys.

One program computes dQ ``[16 tokens x 8 heads, 512]`` per tile, as ``hopper_window_forward``
does out. With Q and dO ``[128, 512]`` and the run's keys K in shared memory:

    P  = exp2(scale log2e Q K^T - lse)      dP = dO K^T      delta = rowsum(P dP)
    dS = scale P (dP - delta)               dQ[:, c] = dS K[:, c]      in column pieces c of 64

The sink's value is 0, so rowsum(P dP) is rowsum(out dO), and ``out`` need not be read. P and dS
are written as ``hopper_window_key_gradient`` reads them: bf16 ``[tile, 128, 128]`` for the keys
that both halves of the run see and ``[tile, 128, 16]`` for the others, the columns of each 32
exchanged (``hopper_window_rows``), and of 16 likewise: 8 i + 2 q + e is at 4 q + 2 i + e.
"""

from .gluon_compat import gl, gluon, warpgroup_mma_wait
from .hopper_tiles import Rows
from .hopper_window_rows import (
    COLUMNS,
    HALF,
    LOG2E,
    MORE_SCORES,
    OF_VALUES,
    PIECE,
    PIECES,
    SCORES,
    TILE_HEADS,
    TILE_ROWS,
    WINDOW,
    begin_turns,
    exchanged,
    fetch_rows,
    load_keys,
    pass_turn,
    run_of,
    sights,
    take_turn,
    with_marks,
)

# Rows of P and dS as a thread holds them, their columns exchanged.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )
)
MORE_STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 16],
    )
)

STRIDES = tuple(f"{x}_{dim}" for x in ("query", "do", "local", "dq") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "window", "splits", "split_tiles")


@gluon.jit
def _store_scores(scores, more, STORE, MORE_STORE, tile):
    """Write a tile's P or dS."""
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, STORED))
    slot = gl.arange(0, WINDOW, layout=gl.SliceLayout(0, STORED))
    scores = gl.convert_layout(exchanged(scores, TILE_ROWS, WINDOW), STORED)
    target = STORE + tile.to(gl.int64) * (TILE_ROWS * WINDOW)
    gl.store(target + (row * WINDOW)[:, None] + slot[None, :], scores)
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, MORE_STORED))
    slot = gl.arange(0, HALF, layout=gl.SliceLayout(0, MORE_STORED))
    more = gl.permute(more.reshape([TILE_ROWS, 2, 4, 2]), (0, 2, 1, 3)).reshape([TILE_ROWS, HALF])
    target = MORE_STORE + tile.to(gl.int64) * (TILE_ROWS * HALF)
    more = gl.convert_layout(more, MORE_STORED)
    gl.store(target + (row * HALF)[:, None] + slot[None, :], more)


@gluon.jit
def _store_query_gradient(run, gradient, keys, half, first_head, ds, more_ds):
    """Compute and write a tile's dQ."""
    dtype: gl.constexpr = gradient.pointer.dtype.element_ty
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, PIECE))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PIECE))
    weights = gl.convert_layout(ds, OF_VALUES)
    more_weights = gl.convert_layout(more_ds, OF_VALUES)
    t, head, exists = run.row(half, first_head, row)
    target = run.rows_of(gradient, t, head)[:, None] + column[None, :]
    # Not unrolled: ptxas would have all products run ahead, and spill.
    for c in range(0, PIECES, 2):
        a = keys.weighted(weights, more_weights, half, c)
        b = keys.weighted(weights, more_weights, half, c + 1)
        a = warpgroup_mma_wait(2, deps=[a])
        dq = exchanged(a.to(dtype), TILE_ROWS, COLUMNS)
        gl.store(target + c * COLUMNS, gl.convert_layout(dq, PIECE), mask=exists[:, None])
        b = warpgroup_mma_wait(0, deps=[b])
        dq = exchanged(b.to(dtype), TILE_ROWS, COLUMNS)
        gl.store(target + (c + 1) * COLUMNS, gl.convert_layout(dq, PIECE), mask=exists[:, None])


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES, "first_run"))
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
    window,
    splits,
    split_tiles,
    first_run,
    LSE,
    DELTA,
    P,
    MORE_P,
    DS,
    MORE_DS,
    scale,
    scale_log2,
    QUERY_GRADIENT: gl.constexpr,
    KEY_GRADIENT: gl.constexpr,
):
    """A chunk's tokens, from run ``first_run`` on; P and dS are of these alone.

    Strides of query, dO, KV and dQ are in units of 8 elements; ``splits`` programs share a run,
    ``split_tiles`` times 8 heads each.
    """
    dtype: gl.constexpr = Q.dtype.element_ty
    number = gl.program_id(0) // splits
    run = run_of(START, start_b, start_t, heads, tokens, window, first_run + number)
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    gradient = Rows(DQ, dq_b, dq_h, dq_t)
    head_tiles = (heads + TILE_HEADS - 1) // TILE_HEADS
    first_tile = gl.program_id(0) % splits * split_tiles
    last_tile = gl.minimum(first_tile + split_tiles, head_tiles)
    count = 2 * (last_tile - first_tile)

    # The first tile's rows come as far as the L2 cache while the keys are loaded.
    fetch_rows(run, query, 0, first_tile * TILE_HEADS)
    fetch_rows(run, upstream, 0, first_tile * TILE_HEADS)
    keys, odd = load_keys(run, Rows(LOCAL, local_b, local_h, local_t))
    x0, x1, x2, x3 = run.load(query, 0, first_tile * TILE_HEADS, 0, 4)
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, SCORES))
    p = gl.zeros([TILE_ROWS, WINDOW], dtype, layout=SCORES)
    more_p = gl.zeros([TILE_ROWS, HALF], dtype, layout=MORE_SCORES)
    begin_turns()
    # A tile's Q in one round, its dO in the next: in one, ptxas would mix them, and spill.
    for i in range(2 * count):
        half = i // 2 % 2
        first_head = (first_tile + i // 4) * TILE_HEADS
        zero = i >> 28
        t, head, exists = run.row(half, first_head, row)
        statistic = run.statistic(t, head)
        # Of the next round's rows; past the last one, of no head.
        next_half = (i + 1) // 2 % 2
        next_head = gl.where(i + 1 < 2 * count, (first_tile + (i + 1) // 4) * TILE_HEADS, heads)
        source, next_source = query.either(upstream, i % 2), upstream.either(query, i % 2)

        # Six of a round's eight pieces are on their way or in use at a time.
        s = gl.zeros([TILE_ROWS, WINDOW], gl.float32, layout=SCORES)
        more = gl.zeros([TILE_ROWS, HALF], gl.float32, layout=MORE_SCORES)
        x4, x5 = run.load(source, half, first_head, 4, 2)
        take_turn()
        s, more = keys.add_scores((x0, x1), half, zero, s, more, 0, 2)
        s, more = keys.add_scores((x2, x3), half, zero, s, more, 2, 2)
        s, more = warpgroup_mma_wait(4, deps=[s, more])
        x6, x7 = run.load(source, half, first_head, 6, 2)
        s, more = keys.add_scores((x4, x5), half, zero, s, more, 4, 2)
        s, more = warpgroup_mma_wait(4, deps=[s, more])
        x0, x1 = run.load(next_source, next_half, next_head, 0, 2)
        s, more = keys.add_scores((x6, x7), half, zero, s, more, 6, 2)
        s, more = warpgroup_mma_wait(4, deps=[s, more])
        x2, x3 = run.load(next_source, next_half, next_head, 2, 2)
        s, more = warpgroup_mma_wait(0, deps=[s, more])
        pass_turn((i + 1 == 2 * count).to(gl.int32))
        seen, more_seen = sights(run, half, first_head)
        if i % 2 == 0:
            s, more = with_marks(keys, odd, half, s, more)
            lse = gl.load(LSE + statistic, mask=exists, other=0.0) * LOG2E
            more_lse = gl.convert_layout(lse, gl.SliceLayout(1, MORE_SCORES))
            p = gl.where(seen, gl.exp2(s * scale_log2 - lse[:, None]), 0.0).to(dtype)
            more_p = gl.exp2(more * scale_log2 - more_lse[:, None])
            more_p = gl.where(more_seen, more_p, 0.0).to(dtype)
        else:
            wide, more_wide = p.to(gl.float32), more_p.to(gl.float32)
            # Unseen keys' dP may be NaN, if dO is.
            delta = gl.sum(gl.where(seen, wide * s, 0.0), 1)
            more_delta = gl.sum(gl.where(more_seen, more_wide * more, 0.0), 1)
            delta += gl.convert_layout(more_delta, gl.SliceLayout(1, SCORES))
            gl.store(DELTA + statistic, delta, mask=exists)
            more_delta = gl.convert_layout(delta, gl.SliceLayout(1, MORE_SCORES))
            ds = gl.where(seen, wide * (s - delta[:, None]) * scale, 0.0).to(dtype)
            more_ds = more_wide * (more - more_delta[:, None]) * scale
            more_ds = gl.where(more_seen, more_ds, 0.0).to(dtype)
            if KEY_GRADIENT:
                tile = (number * 2 + half) * head_tiles + first_tile + i // 4
                _store_scores(p, more_p, P, MORE_P, tile)
                _store_scores(ds, more_ds, DS, MORE_DS, tile)
            if QUERY_GRADIENT:
                _store_query_gradient(run, gradient, keys, half, first_head, ds, more_ds)
