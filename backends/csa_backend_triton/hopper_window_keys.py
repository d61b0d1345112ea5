# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The window's keys in shared memory, kept from token to token.

A program of the window-only Hopper kernels walks a run of consecutive tokens, whose windows of up
to 128 keys share all but one. It keeps the keys in a ring of 144 rows: row k of ``local_kv`` lies
at slot k % 144, so a token t sees the slots s with (t - s) mod 144 < its window rows. After the
first 144, rows come in groups of 8, each loaded while the tokens before its own 8 are worked on:
16 rows more than a window are as much as that needs.

All 144 slots enter every matrix product, the unseen ones with weight 0, and 0 times NaN is NaN.
So a row that holds a NaN or Inf is kept as zeros, and a ``mark`` of NaN beside it, to be added to
its scores; other marks are 0.

Tokens and keys are counted through the batch (flat): token t of batch entry b is b * T + t. Rows
lie in column tiles of 64, 128 slots in one buffer and 16 in another, since tiles are powers of 2.
"""

from .gluon_compat import (
    aggregate,
    arrive_when_copied,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
)
from .hopper_tiles import barriers

WINDOW = gl.constexpr(128)
EXTRA = gl.constexpr(16)
SLOTS = gl.constexpr(144)
GROUP = gl.constexpr(8)
GROUPS = gl.constexpr(18)
MAIN_GROUPS = gl.constexpr(16)
COLUMNS = gl.constexpr(64)
TILES = gl.constexpr(8)

ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# A group's tile of 64 columns, 4 of them a thread.
PIECE = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@aggregate
class Run:
    """The tokens ``first .. end - 1`` (flat) of a program, and how to find their windows.

    ``START`` holds each token's first visible position in its batch entry, or is None. An item is
    64 heads of one token; a token's head blocks are neighbours.
    """

    START: gl.tensor | gl.constexpr
    start_b: gl.tensor
    start_t: gl.tensor
    heads: gl.tensor
    head_blocks: gl.tensor
    tokens: gl.tensor
    rows: gl.tensor
    window: gl.tensor
    first: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, START, start_b, start_t, heads, head_blocks, tokens, rows, window, first, end
    ):
        self.START = gl.constexpr(None) if START is None else START
        self.start_b = start_b
        self.start_t = start_t
        self.heads = heads
        self.head_blocks = head_blocks
        self.tokens = tokens
        self.rows = rows
        self.window = window
        self.first = first
        self.end = end

    @gluon.jit
    def items(self):
        """How many items the run has."""
        return (self.end - self.first) * self.head_blocks

    @gluon.jit
    def item(self, i):
        """Flat token and first head of an item."""
        return self.first + i // self.head_blocks, i % self.head_blocks * 64

    @gluon.jit
    def window_rows(self, flat):
        """How many keys a token sees, itself being the last."""
        t = flat % self.tokens
        seen = gl.minimum(t + 1, self.window)
        if self.START is not None:
            b = (flat // self.tokens).to(gl.int64)
            start = gl.load(self.START + b * self.start_b + t.to(gl.int64) * self.start_t)
            seen = gl.maximum(gl.minimum(seen, t + 1 - start), 0)
        return seen

    @gluon.jit
    def rows_of(self, tensor, flat, head, column):
        """Pointers ``[heads, columns]`` into a token's rows of a ``Rows`` tensor."""
        b, t = (flat // self.tokens).to(gl.int64), (flat % self.tokens).to(gl.int64)
        start = tensor.pointer + b * tensor.b * 8 + t * tensor.t * 8
        return start + (head.to(gl.int64) * tensor.h * 8)[:, None] + column[None, :]

    @gluon.jit
    def statistic(self, flat, head):
        """Offsets of a token's heads in a ``[B, H, T]`` contiguous tensor."""
        b, t = flat // self.tokens, flat % self.tokens
        return (b * self.heads + head).to(gl.int64) * self.tokens + t


@aggregate
class Ring:
    """The keys and their marks, and the barriers that hand them over.

    ``landed`` completes when the first keys are there, ``checked`` when all have looked at their
    share of them. ``ready`` and ``done`` alternate between epochs of 8 tokens: ``ready[e % 2]``
    completes when all keys of epoch e's tokens are there, ``done[2 w + e % 2]`` when consumer w of
    ``consumers`` is done with it.
    """

    main: gl.shared_memory_descriptor
    extra: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor
    extra_marks: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    checked: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    consumers: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, marks, ring_barriers, consumers):
        self.main, self.extra = tiles
        self.marks, self.extra_marks = marks
        self.landed, self.checked, self.ready, self.done = ring_barriers
        self.consumers = gl.constexpr(consumers)

    @gluon.jit
    def column_tile(self, c):
        """Columns 64 c .. 64 c + 63 of the keys: ``[128, 64]`` and ``[16, 64]``."""
        return self.main.index(c), self.extra.index(c)

    @gluon.jit
    def marks_of(self, layout: gl.constexpr, extra_layout: gl.constexpr):
        """The slots' marks, ``[128]`` and ``[16]``."""
        marks = self.marks._reinterpret(gl.float32, [WINDOW], LINE)
        extra = self.extra_marks._reinterpret(gl.float32, [EXTRA], LINE)
        return marks.load(layout), extra.load(extra_layout)

    @gluon.jit
    def wait(self, epoch):
        """Until the keys of an epoch's tokens are there."""
        mbarrier.wait(self.ready.index(epoch % 2), (epoch // 2) & 1)

    @gluon.jit
    def release(self, run, i, CONSUMER: gl.constexpr):
        """Say that this consumer is done with item ``i``."""
        epoch_items = GROUP * run.head_blocks
        epoch = i // epoch_items
        last = (i + self.consumers) // epoch_items != epoch
        mbarrier.arrive(self.done.index(2 * CONSUMER + epoch % 2), count=1, pred=last)

    @gluon.jit
    def check(self, PART: gl.constexpr):
        """Look at a half of the first 128 slots (0, 1) or at the other 16 (2)."""
        mbarrier.wait(self.landed.index(0), 0)
        if PART == 2:
            marks = self.extra_marks._reinterpret(gl.float32, [EXTRA], LINE)
            _check(self.extra, marks, 0, EXTRA)
        else:
            marks = self.marks._reinterpret(gl.float32, [WINDOW], LINE)
            _check(self.main, marks, PART * (WINDOW // 2), WINDOW // 2)
        fence_async_shared()
        mbarrier.arrive(self.checked.index(0), count=1)


@gluon.jit
def _check(tiles, marks, START: gl.constexpr, COUNT: gl.constexpr):
    """Set the marks of slots ``START .. START + COUNT - 1``, and zero marked rows."""
    mark = gl.zeros([COUNT, COLUMNS], gl.float32, layout=ROWS)
    for c in gl.static_range(TILES):
        x = tiles.index(c).slice(START, COUNT, dim=0).load(ROWS)
        mark += x.to(gl.float32) * 0.0
    mark = gl.sum(mark, 1)
    marks.slice(START, COUNT, dim=0).store(mark)
    sound = mark == 0.0
    if gl.min(sound.to(gl.int32), 0) == 0:
        for c in gl.static_range(TILES):
            rows = tiles.index(c).slice(START, COUNT, dim=0)
            kept = gl.where(sound[:, None], rows.load(ROWS).to(gl.float32), 0.0)
            rows.store(kept.to(tiles.dtype))


@gluon.jit
def allocate_ring(dtype: gl.constexpr, CONSUMERS: gl.constexpr):
    """An empty ring."""
    main = gl.allocate_shared_memory(dtype, [TILES, WINDOW, COLUMNS], TILE)
    extra = gl.allocate_shared_memory(dtype, [TILES, EXTRA, COLUMNS], TILE)
    marks = gl.allocate_shared_memory(gl.float32, [MAIN_GROUPS, GROUP], LINE)
    extra_marks = gl.allocate_shared_memory(gl.float32, [GROUPS - MAIN_GROUPS, GROUP], LINE)
    ring_barriers = (barriers(1, 128), barriers(1, 3), barriers(2, 1), barriers(2 * CONSUMERS, 1))
    return Ring((main, extra), (marks, extra_marks), ring_barriers, CONSUMERS)


@gluon.jit
def visible(flat, window_rows, slot):
    """Which slots a token sees."""
    age = flat % SLOTS - slot
    age = gl.where(age < 0, age + SLOTS, age)
    return age < window_rows


@gluon.jit
def _piece(ring, group, c: gl.constexpr, MAIN: gl.constexpr):
    """Where a group's ``c``-th column tile lies, ``[8, 64]``; counted by 8 rows, tiles stack."""
    dtype: gl.constexpr = ring.main.dtype
    if MAIN:
        pieces = ring.main._reinterpret(dtype, [TILES * MAIN_GROUPS, GROUP, COLUMNS], TILE)
        return pieces.index(c * MAIN_GROUPS + group)
    extra: gl.constexpr = GROUPS - MAIN_GROUPS
    pieces = ring.extra._reinterpret(dtype, [TILES * extra, GROUP, COLUMNS], TILE)
    return pieces.index(c * extra + group - MAIN_GROUPS)


@gluon.jit
def _source(local, run, key, column):
    """Pointers to rows' first column tile, and which of them exist."""
    exists = (key >= 0) & (key < run.rows)
    key = gl.where(exists, key, 0)
    b, t = (key // run.tokens).to(gl.int64), (key % run.tokens).to(gl.int64)
    rows = b * local.b * 8 + t * local.t * 8
    return local.pointer + rows[:, None] + column[None, :], exists[:, None]


@gluon.jit
def _copy_first(tiles, run, local, START: gl.constexpr, COUNT: gl.constexpr):
    """Copy the keys that slots ``START .. START + COUNT - 1`` hold at first."""
    slot = START + gl.arange(0, COUNT, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ROWS))
    oldest = run.first - WINDOW
    # Of a slot, counted from the oldest key's; that key may be negative, hence the 144 more.
    place = (slot - (oldest + SLOTS) % SLOTS + SLOTS) % SLOTS
    source, exists = _source(local, run, oldest + place, column)
    for c in gl.static_range(TILES):
        rows = tiles.index(c).slice(START % tiles.shape[1], COUNT, dim=0)
        copy_async(rows, source + c * COLUMNS, mask=exists)


@gluon.jit
def begin_keys(run, ring, local):
    """The run's first 144 keys, which the epochs 0 and 1 see; part of the copying warpgroup's."""
    for part in gl.static_range(4):
        _copy_first(ring.main, run, local, part * (WINDOW // 4), WINDOW // 4)
    _copy_first(ring.extra, run, local, WINDOW, EXTRA)
    arrive_when_copied(ring.landed.index(0), increment_count=False)
    ring.check(2)
    mbarrier.wait(ring.checked.index(0), 0)
    fence_async_shared()
    mbarrier.arrive(ring.ready.index(0), count=1)
    mbarrier.arrive(ring.ready.index(1), count=1)


@gluon.jit
def _keep(ring, group, tiles, MAIN: gl.constexpr):
    """Store a group's rows, those with a NaN or Inf as zeros, and their marks."""
    mark = gl.zeros([GROUP, COLUMNS], gl.float32, layout=PIECE)
    for c in gl.static_range(TILES):
        mark += tiles[c].to(gl.float32) * 0.0
    mark = gl.sum(mark, 1)
    if MAIN:
        ring.marks.index(group).store(mark)
    else:
        ring.extra_marks.index(group - MAIN_GROUPS).store(mark)
    sound = (mark == 0.0)[:, None]
    for c in gl.static_range(TILES):
        kept = gl.where(sound, tiles[c].to(gl.float32), 0.0)
        _piece(ring, group, c, MAIN).store(kept.to(ring.main.dtype))


@gluon.jit
def more_keys(run, ring, local, i):
    """The 8 keys that the next epoch's tokens add, at the middle of an epoch's items."""
    epoch_items = GROUP * run.head_blocks
    epoch = i // epoch_items + 1
    needed = (epoch >= 2) & (run.first + epoch * GROUP < run.end)
    if needed & (i % epoch_items == epoch_items // 2):
        key = run.first + epoch * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(1, PIECE))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PIECE))
        source, exists = _source(local, run, key, column)
        tiles = ()
        for c in gl.static_range(TILES):
            tile = gl.load(source + c * COLUMNS, mask=exists, other=0.0)
            tiles = tiles + (tile,)  # noqa: RUF005
        # Its slots are those of the keys that epoch - 2 saw last.
        for consumer in gl.static_range(ring.consumers):
            done = ring.done.index(2 * consumer + epoch % 2)
            mbarrier.wait(done, ((epoch - 2) // 2) & 1)
        group = (run.first // GROUP + epoch) % GROUPS
        if group < MAIN_GROUPS:
            _keep(ring, group, tiles, True)
        else:
            _keep(ring, group, tiles, False)
        fence_async_shared()
        mbarrier.arrive(ring.ready.index(epoch % 2), count=1)
