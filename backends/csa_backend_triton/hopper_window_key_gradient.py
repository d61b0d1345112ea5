# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper backward of window-only calls, head_dim 512: dKV of a run of tokens, without atomics.

One program owns 256 columns and the 160 keys of a run of 32 tokens, and adds up, over the run's
rows and some of its heads,

    dKV^T [256 columns, 128 + 16 keys] += dO^T P + Q^T dS

in steps of 16 tokens by 4 heads, from P and dS as ``hopper_window_backward`` stored them. The sums
of the keys that only the run's first half sees are written after that, and start anew for those
that only its second half does. Sums come out as fp32 ``[runs, splits, 160, 512]``;
``window_key_sums_kernel`` adds them. A step's operands are copied while the step before is
multiplied.

A row of Q and dO with a NaN or Inf is read as 0 if lse or delta shows it: its P and dS are NaN
where it counts and 0 elsewhere. So are those of tokens without keys. An Inf that neither shows,
all scores of its row being -inf beside a sink, reaches keys of its tile that its token does not
see.
"""

from .gluon_compat import (
    aggregate,
    barrier,
    commit_group,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    wait_group,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_tiles import Rows
from .hopper_window_rows import GROUP, HALF, TILE_ROWS, WINDOW, Run, run_of
from .hopper_window_tiles import KEYS

WIDTH = gl.constexpr(512)
OWN = gl.constexpr(256)
RUN_KEYS = gl.constexpr(160)

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
MORE_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 16, 16]))
MORE_KEYS = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
SLOTS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
MORE_SLOTS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))

STRIDES = tuple(f"{x}_{dim}" for x in ("query", "do") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "window", "splits", "split_groups")


@aggregate
class Part:
    """The steps of a program: a run's first half, then its second, four heads at a time."""

    run: Run
    first_group: gl.tensor
    groups: gl.tensor
    half_steps: gl.tensor
    first_column: gl.tensor
    number: gl.tensor

    @gluon.constexpr_function
    def __init__(self, run, first_group, groups, half_steps, first_column, number):
        self.run = run
        self.first_group = first_group
        self.groups = groups
        self.half_steps = half_steps
        self.first_column = first_column
        self.number = number

    @gluon.jit
    def step(self, i):
        """Half of the run and heads' group of a step, and where its P and dS begin, in rows."""
        half, group = i // self.half_steps, self.first_group + i % self.half_steps
        tile = (self.number * 2 + half) * self.groups + group
        return half, group, tile.to(gl.int64) * TILE_ROWS

    @gluon.jit
    def statistics(self, LSE, DELTA, i):
        """lse and delta of a step's rows, NaN for those it must not read."""
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, ROWS))
        half, group, _ = self.step(i)
        t, head, exists = self.run.row(half, group, row)
        reads = exists & (self.run.window_rows(t) > 0)
        place = self.run.statistic(t, head)
        lse = gl.load(LSE + place, mask=reads, other=float("nan"))
        return lse, gl.load(DELTA + place, mask=reads, other=float("nan"))

    @gluon.jit
    def copy_rows(self, tile, tensor, i, sound):
        """Copy the program's columns of a step's Q or dO."""
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, ROWS))
        column = self.first_column + gl.arange(0, OWN, layout=gl.SliceLayout(0, ROWS))
        half, group, _ = self.step(i)
        t, head, _ = self.run.row(half, group, row)
        source = self.run.rows_of(tensor, t, head)[:, None] + column[None, :]
        copy_async(tile, source, mask=sound[:, None])

    @gluon.jit
    def copy_scores(self, tile, more_tile, SCORES, MORE_SCORES, i):
        """Copy a step's P or dS."""
        _, _, place = self.step(i)
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, SLOTS))
        slot = gl.arange(0, WINDOW, layout=gl.SliceLayout(0, SLOTS))
        copy_async(tile, SCORES + place * WINDOW + (row * WINDOW)[:, None] + slot[None, :])
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, MORE_SLOTS))
        slot = gl.arange(0, HALF, layout=gl.SliceLayout(0, MORE_SLOTS))
        source = MORE_SCORES + place * HALF + (row * HALF)[:, None] + slot[None, :]
        copy_async(more_tile, source)


@gluon.jit
def _store_sums(sums, target, LAYOUT: gl.constexpr, SLOTS: gl.constexpr):
    """Write sums to their keys' rows, 0 being that of slot 0."""
    column = gl.arange(0, OWN, layout=gl.SliceLayout(1, LAYOUT))
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, LAYOUT))
    # The order of P's columns undone: 8 q + 2 i + e, or 4 q + 2 i + e of 16.
    if SLOTS == HALF:
        key = slot // 2 % 2 * 8 + slot // 4 * 2 + slot % 2
    else:
        key = slot // 32 * 32 + slot // 2 % 4 * 8 + slot // 8 % 4 * 2 + slot % 2
    gl.store(target + column[:, None] + (key * WIDTH)[None, :], sums)


@aggregate
class Operands:
    """Two stages of a step's operands in shared memory."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    more_p: gl.shared_memory_descriptor
    more_ds: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, p, ds, more_p, more_ds):
        self.q, self.do = q, do
        self.p, self.ds = p, ds
        self.more_p, self.more_ds = more_p, more_ds


@aggregate
class Stored:
    """P and dS in memory."""

    p: gl.tensor
    more_p: gl.tensor
    ds: gl.tensor
    more_ds: gl.tensor

    @gluon.constexpr_function
    def __init__(self, p, more_p, ds, more_ds):
        self.p, self.more_p = p, more_p
        self.ds, self.more_ds = ds, more_ds


@gluon.jit
def _copy(part, operands, query, upstream, stored, lse, delta, i):
    """Copy a step's operands, as a group of its own; past the last step an empty one."""
    if i < 2 * part.half_steps:
        sound = (gl.abs(lse) < float("inf")) & (gl.abs(delta) < float("inf"))
        stage = i % 2
        part.copy_rows(operands.do.index(stage), upstream, i, sound)
        part.copy_rows(operands.q.index(stage), query, i, sound)
        p, more_p = operands.p.index(stage), operands.more_p.index(stage)
        part.copy_scores(p, more_p, stored.p, stored.more_p, i)
        ds, more_ds = operands.ds.index(stage), operands.more_ds.index(stage)
        part.copy_scores(ds, more_ds, stored.ds, stored.more_ds, i)
    commit_group()


@gluon.jit
def _add(x, scores, more_scores, sums, more):
    """Add x^T times scores, as two unfinished wgmma."""
    x = x.permute((1, 0))
    sums = warpgroup_mma(x, scores, sums, is_async=True)
    return sums, warpgroup_mma(x, more_scores, more, is_async=True)


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES, "first_run"))
def window_key_gradient_kernel(
    Q,
    query_b,
    query_h,
    query_t,
    DO,
    do_b,
    do_h,
    do_t,
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
    SUMS_OUT,
):
    """A chunk's tokens, from run ``first_run`` on; P, dS and sums are of these alone.

    Strides of query and dO are in units of 8 elements. Two programs for each of the ``splits`` of
    a run.
    """
    dtype: gl.constexpr = Q.dtype.element_ty
    number = gl.program_id(0) // (2 * splits)
    run = run_of(START, start_b, start_t, heads, tokens, window, first_run + number)
    groups = (heads + GROUP - 1) // GROUP
    first_group = gl.program_id(0) // 2 % splits * split_groups
    half_steps = gl.minimum(first_group + split_groups, groups) - first_group
    first_column = gl.program_id(0) % 2 * OWN
    part = Part(run, first_group, groups, half_steps, first_column, number)
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    operands = Operands(
        gl.allocate_shared_memory(dtype, [2, TILE_ROWS, OWN], KEYS),
        gl.allocate_shared_memory(dtype, [2, TILE_ROWS, OWN], KEYS),
        gl.allocate_shared_memory(dtype, [2, TILE_ROWS, WINDOW], KEYS),
        gl.allocate_shared_memory(dtype, [2, TILE_ROWS, WINDOW], KEYS),
        gl.allocate_shared_memory(dtype, [2, TILE_ROWS, HALF], MORE_KEYS),
        gl.allocate_shared_memory(dtype, [2, TILE_ROWS, HALF], MORE_KEYS),
    )
    stored = Stored(P, MORE_P, DS, MORE_DS)
    target = SUMS_OUT + (gl.program_id(0) // 2).to(gl.int64) * (RUN_KEYS * WIDTH) + first_column
    sums = gl.zeros([OWN, WINDOW], gl.float32, layout=SUMS)
    more = gl.zeros([OWN, HALF], gl.float32, layout=MORE_SUMS)
    lse, delta = part.statistics(LSE, DELTA, 0)
    _copy(part, operands, query, upstream, stored, lse, delta, 0)
    # One step ahead of its copies, so that they need not wait.
    lse, delta = part.statistics(LSE, DELTA, 1)
    for i in range(2 * half_steps):
        _copy(part, operands, query, upstream, stored, lse, delta, i + 1)
        lse, delta = part.statistics(LSE, DELTA, i + 2)
        wait_group(1)
        fence_async_shared()
        barrier()
        stage = i % 2
        p, more_p = operands.p.index(stage), operands.more_p.index(stage)
        ds, more_ds = operands.ds.index(stage), operands.more_ds.index(stage)
        sums, more = _add(operands.do.index(stage), p, more_p, sums, more)
        sums, more = _add(operands.q.index(stage), ds, more_ds, sums, more)
        sums, more = warpgroup_mma_wait(0, deps=[sums, more])
        barrier()
        if i == half_steps - 1:
            _store_sums(more, target, MORE_SUMS, HALF)
            more = gl.zeros([OWN, HALF], gl.float32, layout=MORE_SUMS)
    _store_sums(more, target + (WINDOW + HALF) * WIDTH, MORE_SUMS, HALF)
    _store_sums(sums, target + HALF * WIDTH, SUMS, WINDOW)
