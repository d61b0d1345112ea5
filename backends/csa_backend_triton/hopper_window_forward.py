# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper forward of window-only calls, head_dim 512: tiles of a run's tokens against its keys.

One program computes out ``[16 tokens x 4 heads, 512]`` per tile, for some heads of a run of 32
tokens, whose keys K all stay in shared memory (``hopper_window_tiles``). So the softmax needs one
pass and out no accumulator that lasts: with Q ``[64, 512]``,

    S = scale log2e Q K^T      m = rowmax S      P = exp2(S - m)      l = rowsum P
    out[:, c] = P K[:, c] / (l + exp2(sink log2e - m))                in column pieces c of 64
    lse = m / log2e + log(l + exp2(sink log2e - m))
"""

from .gluon_compat import gl, gluon
from .hopper_tiles import Rows
from .hopper_window_rows import GROUP, LN2, LOG2E, MORE_SCORES, SCORES, TILE_ROWS, run_of
from .hopper_window_tiles import FIRST, SECOND, allocate

LOWEST = gl.constexpr(-3.4e38)

STRIDES = tuple(f"{name}_{dim}" for name in ("query", "local", "out") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "window", "splits", "split_groups")


@gluon.jit
def _softmax(seen, more_seen, s, more, sink, scale_log2, empty):
    """P of both products, each row's lse, and the factor that its out still lacks."""
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
def _load(run, shared, query, first_group, last_group):
    shared.load(run, query, query, first_group, last_group, 1)


@gluon.jit
def _attend(
    run, shared, local, out, first_group, last_group, SINK, LSE, scale_log2, HALF_OF: gl.constexpr
):
    """All of a half of the run but the loading of its rows."""
    dtype: gl.constexpr = local.pointer.dtype.element_ty
    shared.keep_keys(run, local, HALF_OF)
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, SCORES))
    for group in range(first_group, last_group):
        t, head, exists = run.row(HALF_OF, group, row)
        if SINK is None:
            sink = gl.full([TILE_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        else:
            sink = gl.load(SINK + head, mask=exists, other=0.0).to(gl.float32)
        empty = run.window_rows(t) == 0
        s, more = shared.scores((group - first_group) & 1, group >> 28, HALF_OF)
        s, more = shared.marked(s, more, HALF_OF)
        seen, more_seen = run.sights(HALF_OF, group)
        p, more_p, lse, factor = _softmax(seen, more_seen, s, more, sink, scale_log2, empty)
        gl.store(LSE + run.statistic(t, head), lse, mask=exists)
        p, more_p = p.to(dtype), more_p.to(dtype)
        shared.store_weighted(run, out, group, p, more_p, factor, HALF_OF)


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
    split_groups,
    SINK,
    LSE,
    scale_log2,
    ATTEND_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Strides of query, KV and out are in units of 8 elements.

    ``splits`` programs share a run, ``split_groups`` times 4 heads each.
    """
    number = gl.program_id(0) // splits
    run = run_of(START, start_b, start_t, heads, tokens, window, number)
    query = Rows(Q, query_b, query_h, query_t)
    out = Rows(OUT, out_b, out_h, out_t)
    first_group = gl.program_id(0) % splits * split_groups
    last_group = gl.minimum(first_group + split_groups, (heads + GROUP - 1) // GROUP)
    shared = allocate(Q.dtype.element_ty)
    local = Rows(LOCAL, local_b, local_h, local_t)
    gl.warp_specialize(
        [
            (
                _attend,
                (run, shared, local, out, first_group, last_group, SINK, LSE, scale_log2, FIRST),
            ),
            (
                _attend,
                (run, shared, local, out, first_group, last_group, SINK, LSE, scale_log2, SECOND),
            ),
            (_load, (run, shared, query, first_group, last_group)),
        ],
        [4, 4],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )
