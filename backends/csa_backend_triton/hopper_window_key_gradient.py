# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Hopper backward of window-only calls, head_dim 512: dKV of a run of tokens, without atomics.

One program owns 256 columns and the keys of a run of consecutive tokens, and adds up, over the
run's tokens t and their head blocks,

    dKV^T [256 columns, 144 slots] += dO_t^T P_t + Q_t^T dS_t

from P and dS as ``hopper_window_backward`` stored them. The accumulator's columns are the slots of
its ring of keys (``hopper_window_keys``), 0 for keys that t does not see. Every 16 tokens the keys
of 16 slots have been seen last: their sums are written and the slots start anew. At the end all
are. Sums come out as fp32 ``[runs, 128 + run_tokens, 512]``, row 0 being key first - 128 of a run
whose first token is ``first``; ``window_key_sums`` adds the runs.

Three warpgroups, synchronised by mbarriers alone: two consumers of 128 columns each, and one that
copies the operands of the next tokens, two tokens deep. A row of Q and dO with a NaN or Inf, which
lse or delta shows, is read as 0: its P and dS are NaN where it counts and 0 elsewhere.
"""

from .gluon_compat import (
    aggregate,
    arrive_when_copied,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_tiles import Rows, barriers
from .hopper_window_keys import COLUMNS, EXTRA, ROWS, SLOTS, TILE, WINDOW, Run
from .hopper_window_tiles import HEADS, Stored

STAGES = gl.constexpr(2)
SLICE_TILES = gl.constexpr(4)
SLICES = gl.constexpr(2)
WIDTH = gl.constexpr(512)

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
EXTRA_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


def _flush_asm(slots: int, first_group: int) -> tuple[str, str]:
    """Write and clear one group of 16 slots of a thread's part of ``[64 columns, slots]`` sums.

    Operands: the sums, the same again, the address of the thread's first column in the group's
    first row, the group. A thread holds columns c and c + 8 of slots 2 q and 2 q + 1 of every 8,
    q being its place in its quad.
    """
    count = slots // 2
    place, group = f"${2 * count}", f"${3 * count}"
    lines = [
        "{ .reg .pred other; .reg .b32 lane; .reg .b64 row;",
        "mov.u32 lane, %laneid; and.b32 lane, lane, 3;",
        f"mad.wide.u32 row, lane, {2 * 512 * 4}, {place};",
    ]
    for j in range(slots // 16):
        lines += [f"setp.ne.s32 other, {group}, {first_group + j};", f"@other bra.uni past{j};"]
        for i in range(8):
            octet, lower, odd = i // 4, i // 2 % 2, i % 2
            offset = (octet * 8 + odd) * 512 * 4 + lower * 32
            lines.append(f"st.global.f32 [row+{offset}], ${8 * j + i};")
        lines += [f"mov.f32 ${8 * j + i}, 0f00000000;" for i in range(8)]
        lines.append(f"past{j}:")
    lines.append("}")
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["l"] * count + ["r"] * count
    return "\n".join(lines), ",".join(constraints)


FLUSH, FLUSH_CONSTRAINTS = (gl.constexpr(text) for text in _flush_asm(128, 0))
EXTRA_FLUSH, EXTRA_FLUSH_CONSTRAINTS = (gl.constexpr(text) for text in _flush_asm(16, 8))


@gluon.jit
def _flushed(sums, extra, rows, extra_rows, group):
    """The sums without those of a group of 16 slots, which are written to ``rows``."""
    sums = gl.inline_asm_elementwise(
        FLUSH,
        FLUSH_CONSTRAINTS,
        [sums, gl.expand_dims(rows, 1), group],
        dtype=gl.float32,
        is_pure=False,
        pack=64,
    )
    extra = gl.inline_asm_elementwise(
        EXTRA_FLUSH,
        EXTRA_FLUSH_CONSTRAINTS,
        [extra, gl.expand_dims(extra_rows, 1), group],
        dtype=gl.float32,
        is_pure=False,
        pack=8,
    )
    return sums, extra


@aggregate
class Operands:
    """Two stages of a step's operands, and their barriers.

    A step is 64 heads of one token. ``q`` and ``do`` are column tiles ``[64, 64]``, four a stage.
    """

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    extra_p: gl.shared_memory_descriptor
    extra_ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, scores, extra, full, empty):
        self.q, self.do = tiles
        self.p, self.ds = scores
        self.extra_p, self.extra_ds = extra
        self.full = full
        self.empty = empty


@gluon.jit
def _allocate(dtype: gl.constexpr):
    q = gl.allocate_shared_memory(dtype, [STAGES * SLICE_TILES, HEADS, COLUMNS], TILE)
    do = gl.allocate_shared_memory(dtype, [STAGES * SLICE_TILES, HEADS, COLUMNS], TILE)
    p = gl.allocate_shared_memory(dtype, [STAGES, HEADS, WINDOW], TILE)
    ds = gl.allocate_shared_memory(dtype, [STAGES, HEADS, WINDOW], TILE)
    extra_p = gl.allocate_shared_memory(dtype, [STAGES, EXTRA, HEADS], TILE)
    extra_ds = gl.allocate_shared_memory(dtype, [STAGES, EXTRA, HEADS], TILE)
    return Operands(
        (q, do), (p, ds), (extra_p, extra_ds), barriers(STAGES, 128), barriers(STAGES, 2)
    )


@gluon.jit
def _statistics(run, LSE, DELTA, i):
    """lse and delta of a step's heads, NaN for those it must not read."""
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    i = gl.minimum(i, run.items() - 1)
    flat, first_head = run.item(i)
    head = first_head + offs_h
    reads = (head < run.heads) & (run.window_rows(flat) > 0)
    place = run.statistic(flat, head)
    lse = gl.load(LSE + place, mask=reads, other=float("nan"))
    return lse, gl.load(DELTA + place, mask=reads, other=float("nan"))


@gluon.jit
def _copy_scores(tile, extra_tile, SCORES, EXTRA_SCORES, place):
    """Copy a step's P or dS."""
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, WIDE))
    slot = gl.arange(0, WINDOW, layout=gl.SliceLayout(0, WIDE))
    source = SCORES + place * (HEADS * WINDOW)
    copy_async(tile, source + (row * WINDOW)[:, None] + slot[None, :])
    slot = gl.arange(0, EXTRA, layout=gl.SliceLayout(1, ROWS))
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, ROWS))
    source = EXTRA_SCORES + place * (HEADS * EXTRA)
    copy_async(extra_tile, source + (slot * HEADS)[:, None] + head[None, :])


@gluon.jit
def _copy(run, operands, query, upstream, LSE, DELTA, stored):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ROWS))
    column += gl.program_id(0) % SLICES * (SLICE_TILES * COLUMNS)
    # One step ahead, so that a step's copies need not wait for them.
    lse, delta = _statistics(run, LSE, DELTA, 0)
    for i in range(run.items()):
        flat, first_head = run.item(i)
        head = first_head + offs_h
        sound = (gl.abs(lse) < float("inf")) & (gl.abs(delta) < float("inf"))
        lse, delta = _statistics(run, LSE, DELTA, i + 1)
        q = run.rows_of(query, flat, head, column)
        do = run.rows_of(upstream, flat, head, column)
        place = stored.place(run, flat, first_head)
        stage = i % STAGES
        mbarrier.wait(operands.empty.index(stage), ((i // STAGES) & 1) ^ 1)
        for c in gl.static_range(SLICE_TILES):
            tile = stage * SLICE_TILES + c
            copy_async(operands.q.index(tile), q + c * COLUMNS, mask=sound[:, None])
            copy_async(operands.do.index(tile), do + c * COLUMNS, mask=sound[:, None])
        p, extra_p = operands.p.index(stage), operands.extra_p.index(stage)
        _copy_scores(p, extra_p, stored.p, stored.extra_p, place)
        ds, extra_ds = operands.ds.index(stage), operands.extra_ds.index(stage)
        _copy_scores(ds, extra_ds, stored.ds, stored.extra_ds, place)
        arrive_when_copied(operands.full.index(stage), increment_count=False)


@gluon.jit
def _add(x, scores, extra_scores, sums, extra):
    """Add x^T times scores for a column tile x, as two unfinished wgmma."""
    sums = warpgroup_mma(x.permute((1, 0)), scores, sums, is_async=True)
    extra_scores = extra_scores.permute((1, 0))
    return sums, warpgroup_mma(x.permute((1, 0)), extra_scores, extra, is_async=True)


@gluon.jit
def _consume(run, operands, SUMS_OUT, CONSUMER: gl.constexpr):
    a = gl.zeros([COLUMNS, WINDOW], gl.float32, layout=SUMS)
    b = gl.zeros([COLUMNS, WINDOW], gl.float32, layout=SUMS)
    extra_a = gl.zeros([COLUMNS, EXTRA], gl.float32, layout=EXTRA_SUMS)
    extra_b = gl.zeros([COLUMNS, EXTRA], gl.float32, layout=EXTRA_SUMS)
    tile: gl.constexpr = 2 * CONSUMER
    first_column = (gl.program_id(0) % SLICES * SLICE_TILES + tile) * COLUMNS
    column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, SUMS))
    extra_column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, EXTRA_SUMS))
    block_steps = EXTRA * run.head_blocks
    for i in range(run.items()):
        # The 16 slots that this and the next 15 tokens' keys take, at the first of these tokens.
        block = i // block_steps
        begins = (i % block_steps == 0) & (i > 0)
        group = gl.where(begins, (run.first // EXTRA + block) % (SLOTS // EXTRA), -1)
        rows = SUMS_OUT + ((block - 1) * EXTRA) * WIDTH
        places = (rows + column).to(gl.int64, bitcast=True)
        extra_places = (rows + extra_column).to(gl.int64, bitcast=True)
        a, extra_a = _flushed(a, extra_a, places, extra_places, group)
        shift: gl.constexpr = COLUMNS * 4
        b, extra_b = _flushed(b, extra_b, places + shift, extra_places + shift, group)
        stage = i % STAGES
        mbarrier.wait(operands.full.index(stage), (i // STAGES) & 1)
        fence_async_shared()
        q = stage * SLICE_TILES + tile
        p, extra_p = operands.p.index(stage), operands.extra_p.index(stage)
        ds, extra_ds = operands.ds.index(stage), operands.extra_ds.index(stage)
        a, extra_a = _add(operands.do.index(q), p, extra_p, a, extra_a)
        b, extra_b = _add(operands.do.index(q + 1), p, extra_p, b, extra_b)
        a, extra_a = _add(operands.q.index(q), ds, extra_ds, a, extra_a)
        b, extra_b = _add(operands.q.index(q + 1), ds, extra_ds, b, extra_b)
        a, extra_a, b, extra_b = warpgroup_mma_wait(0, deps=[a, extra_a, b, extra_b])
        mbarrier.arrive(operands.empty.index(stage), count=1)
    blocks = (run.items() + block_steps - 1) // block_steps
    for g in range(SLOTS // EXTRA):
        block = blocks + g
        group = (run.first // EXTRA + block) % (SLOTS // EXTRA)
        rows = SUMS_OUT + ((block - 1) * EXTRA) * WIDTH
        places = (rows + column).to(gl.int64, bitcast=True)
        extra_places = (rows + extra_column).to(gl.int64, bitcast=True)
        a, extra_a = _flushed(a, extra_a, places, extra_places, group)
        shift: gl.constexpr = COLUMNS * 4
        b, extra_b = _flushed(b, extra_b, places + shift, extra_places + shift, group)


STRIDES = tuple(f"{x}_{dim}" for x in ("query", "do") for dim in "bht")
SIZES = ("start_b", "start_t", "heads", "tokens", "rows", "window", "run_tokens")
CHUNK = ("chunk_first", "chunk_end")


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES, *CHUNK))
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
    SUMS_OUT,
    CONSUMER_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """The tokens ``chunk_first .. chunk_end - 1``, two programs a run.

    Strides of query and dO are in units of 8 elements; ``run_tokens`` and ``chunk_first`` are
    multiples of 16.
    """
    operands = _allocate(Q.dtype.element_ty)
    number = gl.program_id(0) // SLICES
    first = chunk_first + number * run_tokens
    end = gl.minimum(first + run_tokens, chunk_end)
    head_blocks = (heads + 63) // 64
    run = Run(START, start_b, start_t, heads, head_blocks, tokens, rows, window, first, end)
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    sums = SUMS_OUT + (number * (run_tokens + WINDOW)).to(gl.int64) * WIDTH
    stored = Stored(P, EXTRA_P, DS, EXTRA_DS, chunk_first)
    gl.warp_specialize(
        [
            (_consume, (run, operands, sums, gl.constexpr(0))),
            (_consume, (run, operands, sums, gl.constexpr(1))),
            (_copy, (run, operands, query, upstream, LSE, DELTA, stored)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, COPY_REGISTERS],
    )
