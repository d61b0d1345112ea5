# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper backward of window-only calls, head_dim 512: dQ, delta, and P and dS for the keys.

One program computes dQ ``[16 tokens x 4 heads, 512]`` per tile, as ``hopper_window_forward``
does out. With Q and dO ``[64, 512]`` and the run's keys K in shared memory:

    P  = exp2(scale log2e Q K^T - lse)      dP = dO K^T      delta = rowsum(P dP)
    dS = scale P (dP - delta)               dQ[:, c] = dS K[:, c]      in column pieces c of 64

The sink's value is 0, so rowsum(P dP) is rowsum(out dO), and ``out`` need not be read. P and dS
are written as ``hopper_window_key_gradient`` reads them: bf16 ``[tile, 64, 128]`` for the keys
that both halves of the run see and ``[tile, 64, 16]`` for the others, the columns of each 32
exchanged (``hopper_window_tiles``), and of 16 likewise: 8 i + 2 q + e is at 4 q + 2 i + e.
"""

from .gluon_compat import aggregate, gl, gluon
from .hopper_tiles import Rows
from .hopper_window_rows import (
    GROUP,
    HALF,
    LOG2E,
    MORE_SCORES,
    SCORES,
    TILE_ROWS,
    WINDOW,
    exchanged,
    run_of,
)
from .hopper_window_tiles import FIRST, SECOND, allocate

# Rows of P and dS as a thread holds them, their columns exchanged.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
MORE_STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)

STRIDES = tuple(f"{x}_{dim}" for x in ("query", "do", "local", "dq") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "window", "splits", "split_groups")


@aggregate
class Results:
    """Where results go: LSE is given, P and dS are of a chunk's runs, ``number`` being this one's.

    Scores are not written, or dQ, unless asked for.
    """

    gradient: Rows
    LSE: gl.tensor
    DELTA: gl.tensor
    P: gl.tensor
    MORE_P: gl.tensor
    DS: gl.tensor
    MORE_DS: gl.tensor
    number: gl.tensor
    query_gradient: gl.constexpr
    key_gradient: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, gradient, statistics, p, ds, number, query_gradient, key_gradient):
        self.gradient = gradient
        self.LSE, self.DELTA = statistics
        self.P, self.MORE_P = p
        self.DS, self.MORE_DS = ds
        self.number = number
        self.query_gradient = gl.constexpr(query_gradient)
        self.key_gradient = gl.constexpr(key_gradient)

    @gluon.jit
    def tile(self, run, half, group):
        """Number of a tile of P and dS."""
        return (self.number * 2 + half) * ((run.heads + GROUP - 1) // GROUP) + group


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
def _load(run, shared, query, upstream, first_group, last_group):
    shared.load(run, query, upstream, first_group, last_group, 2)


@gluon.jit
def _differentiate(
    run, shared, local, results, first_group, last_group, scale, scale_log2, HALF_OF: gl.constexpr
):
    """All of a half of the run but the loading of its rows."""
    dtype: gl.constexpr = local.pointer.dtype.element_ty
    shared.keep_keys(run, local, HALF_OF)
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, SCORES))
    p = gl.zeros([TILE_ROWS, WINDOW], dtype, layout=SCORES)
    more_p = gl.zeros([TILE_ROWS, HALF], dtype, layout=MORE_SCORES)
    # A tile's Q in one round, its dO in the next: in one, ptxas would mix them, and spill.
    for i in range(2 * (last_group - first_group)):
        group = first_group + i // 2
        t, head, exists = run.row(HALF_OF, group, row)
        statistic = run.statistic(t, head)
        tile = results.tile(run, HALF_OF, group)
        seen, more_seen = run.sights(HALF_OF, group)
        s, more = shared.scores(i % 2, i >> 28, HALF_OF)
        if i % 2 == 0:
            s, more = shared.marked(s, more, HALF_OF)
            lse = gl.load(results.LSE + statistic, mask=exists, other=0.0) * LOG2E
            more_lse = gl.convert_layout(lse, gl.SliceLayout(1, MORE_SCORES))
            p = gl.where(seen, gl.exp2(s * scale_log2 - lse[:, None]), 0.0).to(dtype)
            more_p = gl.exp2(more * scale_log2 - more_lse[:, None])
            more_p = gl.where(more_seen, more_p, 0.0).to(dtype)
            if results.key_gradient:
                _store_scores(p, more_p, results.P, results.MORE_P, tile)
        else:
            wide, more_wide = p.to(gl.float32), more_p.to(gl.float32)
            # Unseen keys' dP may be NaN, if dO is.
            delta = gl.sum(gl.where(seen, wide * s, 0.0), 1)
            more_delta = gl.sum(gl.where(more_seen, more_wide * more, 0.0), 1)
            delta += gl.convert_layout(more_delta, gl.SliceLayout(1, SCORES))
            gl.store(results.DELTA + statistic, delta, mask=exists)
            more_delta = gl.convert_layout(delta, gl.SliceLayout(1, MORE_SCORES))
            ds = gl.where(seen, wide * (s - delta[:, None]) * scale, 0.0).to(dtype)
            more_ds = more_wide * (more - more_delta[:, None]) * scale
            more_ds = gl.where(more_seen, more_ds, 0.0).to(dtype)
            if results.key_gradient:
                _store_scores(ds, more_ds, results.DS, results.MORE_DS, tile)
            if results.query_gradient:
                shared.store_weighted(run, results.gradient, group, ds, more_ds, None, HALF_OF)


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
    split_groups,
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
    DIFFERENTIATE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """A chunk's tokens, from run ``first_run`` on; P and dS are of these alone.

    Strides of query, dO, KV and dQ are in units of 8 elements; ``splits`` programs share a run,
    ``split_groups`` times 4 heads each.
    """
    number = gl.program_id(0) // splits
    run = run_of(START, start_b, start_t, heads, tokens, window, first_run + number)
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    gradient = Rows(DQ, dq_b, dq_h, dq_t)
    results = Results(
        gradient, (LSE, DELTA), (P, MORE_P), (DS, MORE_DS), number, QUERY_GRADIENT, KEY_GRADIENT
    )
    first_group = gl.program_id(0) % splits * split_groups
    last_group = gl.minimum(first_group + split_groups, (heads + GROUP - 1) // GROUP)
    shared = allocate(Q.dtype.element_ty)
    gl.warp_specialize(
        [
            (
                _differentiate,
                (run, shared, local, results, first_group, last_group, scale, scale_log2, FIRST),
            ),
            (
                _differentiate,
                (run, shared, local, results, first_group, last_group, scale, scale_log2, SECOND),
            ),
            (_load, (run, shared, query, upstream, first_group, last_group)),
        ],
        [4, 4],
        [DIFFERENTIATE_REGISTERS, LOAD_REGISTERS],
    )
