# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper forward of window-only calls, head_dim 512: tiles of a run's tokens against its keys.

One program computes out ``[16 tokens x 8 heads, 512]`` per tile, for some heads of a run of 32
tokens, whose keys K all stay in shared memory (``hopper_window_rows``). So the softmax needs one
pass and out no accumulator that lasts: with Q ``[128, 512]``,

    S = scale log2e Q K^T      m = rowmax S      P = exp2(S - m)      l = rowsum P
    out[:, c] = P K[:, c] / (l + exp2(sink log2e - m))                in column pieces c of 64
    lse = m / log2e + log(l + exp2(sink log2e - m))

with Q and P in registers. The two warpgroups, 64 rows each, never wait for each other once the
keys are there: one's products run beside the other's softmax, loads and stores. A tile's query is
loaded while the tile before it is weighted.
"""

from .gluon_compat import gl, gluon, warpgroup_mma_wait
from .hopper_tiles import Rows
from .hopper_window_rows import (
    COLUMNS,
    HALF,
    LN2,
    LOG2E,
    MORE_SCORES,
    OF_VALUES,
    PIECE,
    PIECES,
    SCORES,
    TILE_HEADS,
    TILE_ROWS,
    VALUES,
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

LOWEST = gl.constexpr(-3.4e38)

STRIDES = tuple(f"{name}_{dim}" for name in ("query", "local", "out") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "window", "splits", "split_tiles")


@gluon.jit
def _softmax(run, keys, odd, half, first_head, s, more, sink, scale_log2, empty):
    """P of both products, each row's lse, and the factor that its out still lacks."""
    s, more = with_marks(keys, odd, half, s, more)
    seen, more_seen = sights(run, half, first_head)
    s = gl.where(seen, s, float("-inf"))
    more = gl.where(more_seen, more, float("-inf"))
    m = gl.convert_layout(gl.max(more, 1), gl.SliceLayout(1, SCORES))
    m = gl.maximum(gl.maximum(gl.max(s, 1), m) * scale_log2, LOWEST)
    p = gl.exp2(s * scale_log2 - m[:, None])
    more_m = gl.convert_layout(m, gl.SliceLayout(1, MORE_SCORES))
    more_p = gl.exp2(more * scale_log2 - more_m[:, None])
    total = gl.convert_layout(gl.sum(more_p, 1), gl.SliceLayout(1, SCORES)) + gl.sum(p, 1)
    m_end = gl.maximum(m, sink * LOG2E)
    sink_dominates = m_end > m
    share = gl.exp2(m - m_end)
    total = total * share + gl.where(sink_dominates, 1.0, gl.exp2(sink * LOG2E - m))
    # In natural units from the start, so that a dominating sink comes back unrounded.
    lse = gl.where(sink_dominates, sink, m * LN2) + gl.log2(total) * LN2
    # The total of a row without keys may be 0.
    factor = gl.where(empty, 0.0, share / total)
    return p, more_p, gl.where(empty, sink, lse), factor


@gluon.jit
def _weights(run, keys, odd, SINK, LSE, scale_log2, q, first_tile, i, last):
    """P of a tile and the factor that its out still lacks; writes its lse."""
    dtype: gl.constexpr = keys.main.dtype
    half = i % 2
    first_head = (first_tile + i // 2) * TILE_HEADS
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, SCORES))
    t, head, exists = run.row(half, first_head, row)
    if SINK is None:
        sink = gl.full([TILE_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    else:
        sink = gl.load(SINK + head, mask=exists, other=0.0).to(gl.float32)
    s = gl.zeros([TILE_ROWS, WINDOW], gl.float32, layout=SCORES)
    more = gl.zeros([TILE_ROWS, HALF], gl.float32, layout=MORE_SCORES)
    take_turn()
    s, more = keys.add_scores(q, half, i >> 28, s, more, 0, PIECES)
    s, more = warpgroup_mma_wait(0, deps=[s, more])
    pass_turn(last)
    empty = run.window_rows(t) == 0
    p, more_p, lse, factor = _softmax(
        run, keys, odd, half, first_head, s, more, sink, scale_log2, empty
    )
    gl.store(LSE + run.statistic(t, head), lse, mask=exists)
    return p.to(dtype), more_p.to(dtype), factor


@gluon.jit
def _store_output(run, out, keys, half, first_head, p, more_p, factor):
    """Compute and write a tile's out, two column pieces at a time."""
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, PIECE))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PIECE))
    weights = gl.convert_layout(p, OF_VALUES)
    more_weights = gl.convert_layout(more_p, OF_VALUES)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
    t, head, exists = run.row(half, first_head, row)
    target = run.rows_of(out, t, head)[:, None] + column[None, :]
    # Not unrolled: ptxas would have all products run ahead, and spill.
    for c in range(0, PIECES, 2):
        a = keys.weighted(weights, more_weights, half, c)
        b = keys.weighted(weights, more_weights, half, c + 1)
        a = warpgroup_mma_wait(2, deps=[a])
        o = exchanged((a * factor).to(p.dtype), TILE_ROWS, COLUMNS)
        gl.store(target + c * COLUMNS, gl.convert_layout(o, PIECE), mask=exists[:, None])
        b = warpgroup_mma_wait(0, deps=[b])
        o = exchanged((b * factor).to(p.dtype), TILE_ROWS, COLUMNS)
        gl.store(target + (c + 1) * COLUMNS, gl.convert_layout(o, PIECE), mask=exists[:, None])


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
    window,
    splits,
    split_tiles,
    SINK,
    LSE,
    scale_log2,
):
    """Strides of query, KV and out are in units of 8 elements.

    ``splits`` programs share a run, ``split_tiles`` times 8 heads each.
    """
    number = gl.program_id(0) // splits
    run = run_of(START, start_b, start_t, heads, tokens, window, number)
    query = Rows(Q, query_b, query_h, query_t)
    out = Rows(OUT, out_b, out_h, out_t)
    first_tile = gl.program_id(0) % splits * split_tiles
    last_tile = gl.minimum(first_tile + split_tiles, (heads + TILE_HEADS - 1) // TILE_HEADS)
    count = 2 * (last_tile - first_tile)

    # The first tiles' rows come as far as the L2 cache while the keys are loaded.
    fetch_rows(run, query, 0, first_tile * TILE_HEADS)
    fetch_rows(run, query, 1, first_tile * TILE_HEADS)
    keys, odd = load_keys(run, Rows(LOCAL, local_b, local_h, local_t))
    q = run.load(query, 0, first_tile * TILE_HEADS, 0, PIECES)
    begin_turns()
    p, more_p, factor = _weights(run, keys, odd, SINK, LSE, scale_log2, q, first_tile, 0, 0)
    for i in range(count - 1):
        first_head = (first_tile + i // 2) * TILE_HEADS
        next_head = (first_tile + (i + 1) // 2) * TILE_HEADS
        # The next tile's rows, on their way while this one is weighted.
        q = run.load(query, (i + 1) % 2, next_head, 0, PIECES)
        _store_output(run, out, keys, i % 2, first_head, p, more_p, factor)
        last = (i + 2 == count).to(gl.int32)
        p, more_p, factor = _weights(
            run, keys, odd, SINK, LSE, scale_log2, q, first_tile, i + 1, last
        )
    _store_output(run, out, keys, 1, (last_tile - 1) * TILE_HEADS, p, more_p, factor)
