# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Runs of 32 tokens whose windows' keys stay in shared memory: what the window-only kernels share.

The windows of a run, of up to 128 keys each, cover 160 keys, from 128 before its first token on.
A tile is 16 of its tokens by 8 heads: 128 rows, row 16 h + t, that see 144 of the keys. The 128
in the middle belong to both halves of the run; the first 16 to its first half alone, the last 16
to its second. So a product with a tile's keys is one with 128 and one with 16 of them.

Rows of query and upstream gradient go from global memory to registers, where wgmma takes them as
its left operand, and results from its accumulators to global memory. Both hold in a thread
columns 8 i + 2 q + e of 32 (i = 0..3, e = 0, 1), q being its place in its quad. For its eight
columns to be neighbours in memory, keys have the columns of each 32 exchanged in shared memory,
column 8 q + 2 i + e where 8 i + 2 q + e was.

All 144 keys enter every product, unseen ones with weight 0, and 0 times NaN is NaN. So a row
that holds a NaN or Inf is kept as zeros, and a ``mark`` of NaN beside it, to be added to its
scores; other marks are 0.

Runs begin anew in each batch entry, so that a token's results don't depend on its slot.
"""

from .gluon_compat import aggregate, barrier, fence_async_shared, gl, gluon, warpgroup_mma

RUN = gl.constexpr(32)
HALF = gl.constexpr(16)
WINDOW = gl.constexpr(128)
TILE_HEADS = gl.constexpr(8)
TILE_ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(64)
PIECES = gl.constexpr(8)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

KEYS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
MORE_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 16, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
OF_SCORES = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
OF_MORE_SCORES = gl.constexpr(gl.DotOperandLayout(0, MORE_SCORES, 2))
OF_VALUES = gl.constexpr(gl.DotOperandLayout(0, VALUES, 2))
# Rows as a wgmma's left operand holds them, 8 neighbouring columns of 32 a thread.
PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 64],
    )
)
# Keys, as many columns a thread.
KEY_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
MORE_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [0, 32]],
        block_bases=[],
        shape=[32, 64],
    )
)


@gluon.jit
def exchanged(x, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Columns 8 i + 2 q + e and 8 q + 2 i + e of each 32 exchanged, in registers."""
    x = gl.permute(x.reshape([ROWS, WIDTH // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    return x.reshape([ROWS, WIDTH])


@aggregate
class Run:
    """The 32 tokens from ``first`` on of batch entry ``b``, and how to find their windows.

    ``START`` holds each token's first visible position, or is None.
    """

    START: gl.tensor | gl.constexpr
    start_b: gl.tensor
    start_t: gl.tensor
    heads: gl.tensor
    tokens: gl.tensor
    window: gl.tensor
    b: gl.tensor
    first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, START, start_b, start_t, heads, tokens, window, b, first):
        self.START = gl.constexpr(None) if START is None else START
        self.start_b = start_b
        self.start_t = start_t
        self.heads = heads
        self.tokens = tokens
        self.window = window
        self.b = b
        self.first = first

    @gluon.jit
    def row(self, half, first_head, row):
        """Token and head of a tile's rows, and which of them exist."""
        t = self.first + half * HALF + row % HALF
        head = first_head + row // HALF
        return t, head, (t < self.tokens) & (head < self.heads)

    @gluon.jit
    def window_rows(self, t):
        """How many keys tokens see, themselves being the last; 0 for those that don't exist."""
        seen = gl.minimum(t + 1, self.window)
        if self.START is not None:
            place = self.START + self.b.to(gl.int64) * self.start_b
            start = gl.load(place + t.to(gl.int64) * self.start_t, mask=t < self.tokens, other=0)
            seen = gl.minimum(seen, t + 1 - start)
        return gl.where(t < self.tokens, gl.maximum(seen, 0), 0)

    @gluon.jit
    def rows_of(self, tensor, t, head):
        """Pointers to rows of a ``Rows`` tensor."""
        start = tensor.pointer + self.b.to(gl.int64) * tensor.b * 8
        return start + head.to(gl.int64) * tensor.h * 8 + t.to(gl.int64) * tensor.t * 8

    @gluon.jit
    def statistic(self, t, head):
        """Offsets in a ``[B, H, T]`` contiguous tensor."""
        return (self.b * self.heads + head).to(gl.int64) * self.tokens + t

    @gluon.jit
    def load(self, tensor, half, first_head, FIRST: gl.constexpr, COUNT: gl.constexpr):
        """Column pieces ``FIRST .. FIRST + COUNT - 1`` of a tile's rows, ``[128, 64]`` each."""
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, PIECE))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PIECE))
        t, head, exists = self.row(half, first_head, row)
        source = self.rows_of(tensor, t, head)[:, None] + column[None, :]
        pieces = ()
        for c in gl.static_range(FIRST, FIRST + COUNT):
            piece = gl.load(source + c * COLUMNS, mask=exists[:, None], other=0.0)
            pieces = pieces + (piece,)  # noqa: RUF005
        return pieces


@gluon.jit
def run_of(START, start_b, start_t, heads, tokens, window, number):
    """The ``number``-th run of a call."""
    batch_runs = (tokens + (RUN - 1)) // RUN
    b, first = number // batch_runs, number % batch_runs * RUN
    return Run(START, start_b, start_t, heads, tokens, window, b, first)


FETCH = gl.constexpr(
    "{ .reg .pred live; setp.ne.s32 live, $2, 0;"
    " @live cp.async.bulk.prefetch.L2.global [$1], 512; mov.b32 $0, 0; }"
)
LINES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def _fetch(half_rows, live):
    """Have half rows, 512 bytes each, fetched into the L2 cache."""
    gl.inline_asm_elementwise(
        FETCH,
        "=r,l,r",
        [half_rows.to(gl.int64, bitcast=True), live.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fetch_rows(run, tensor, half, first_head):
    """Have a tile's rows fetched into the L2 cache."""
    place = gl.arange(0, 2 * TILE_ROWS, layout=LINES)
    t, head, exists = run.row(half, first_head, place // 2)
    _fetch(run.rows_of(tensor, t, head) + place % 2 * 256, exists)


def _turn_asm(instruction: str) -> str:
    """Of two warpgroups, each: ``bar.sync`` its own barrier or ``bar.arrive`` at the other's."""
    first, second = ("1", "2") if instruction == "bar.sync" else ("2", "1")
    return (
        "{ .reg .pred front, goes; .reg .b32 thread, name; mov.u32 thread, %tid.x;"
        " setp.lt.u32 front, thread, 128;"
        f" selp.b32 name, {first}, {second}, front; setp.ne.s32 goes, $1, 0;"
        f" @goes {instruction} name, 256; mov.b32 $0, 0; }}"
    )


TAKE_TURN, PASS_TURN = (gl.constexpr(_turn_asm(x)) for x in ("bar.sync", "bar.arrive"))


@gluon.jit
def _turn(ASSEMBLY: gl.constexpr, goes):
    gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r", [goes.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_turns():
    """The first warpgroup's turn comes first."""
    thread = gl.arange(0, 256, layout=LINES)
    _turn(PASS_TURN, thread >= 128)


@gluon.jit
def take_turn():
    """Wait until the other warpgroup's scores are done, so that the two don't go in step."""
    thread = gl.arange(0, 256, layout=LINES)
    _turn(TAKE_TURN, thread >= 0)


@gluon.jit
def pass_turn(last):
    """Let the other warpgroup compute scores; after the ``last`` there is none to be let."""
    thread = gl.arange(0, 256, layout=LINES)
    _turn(PASS_TURN, (thread < 128) | (last == 0))


@aggregate
class Keys:
    """A run's keys in pieces of 64 columns, and their marks.

    ``main`` is ``[8, 128, 64]``, ``more`` ``[8 * 2, 16, 64]``: piece c of the keys that belong to
    one half of the run alone is ``2 c + half``.
    """

    main: gl.shared_memory_descriptor
    more: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor
    more_marks: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, main, more, marks, more_marks):
        self.main = main
        self.more = more
        self.marks = marks
        self.more_marks = more_marks

    @gluon.jit
    def add_scores(self, pieces, half, zero, s, more, FIRST: gl.constexpr, COUNT: gl.constexpr):
        """Add x K^T over column pieces of x, ``[128, 128]`` and ``[128, 16]``; unfinished.

        ``zero`` is 0, unknown to the compiler: ptxas hoists all descriptors otherwise, and spills.
        """
        for c in gl.static_range(COUNT):
            x = exchanged(pieces[c], TILE_ROWS, COLUMNS)
            keys = self.main.index(FIRST + c + zero).permute((1, 0))
            s = warpgroup_mma(
                gl.convert_layout(x, OF_SCORES), keys, s, use_acc=FIRST + c > 0, is_async=True
            )
            keys = self.more.index(2 * (FIRST + c) + half).permute((1, 0))
            x = gl.convert_layout(x, OF_MORE_SCORES)
            more = warpgroup_mma(x, keys, more, use_acc=FIRST + c > 0, is_async=True)
        return s, more

    @gluon.jit
    def weighted(self, weights, more_weights, half, c):
        """Weights times column piece ``c`` of the keys, ``[128, 64]``, as an unfinished wgmma."""
        o = gl.zeros([TILE_ROWS, COLUMNS], gl.float32, layout=VALUES)
        o = warpgroup_mma(weights, self.main.index(c), o, use_acc=False, is_async=True)
        return warpgroup_mma(more_weights, self.more.index(2 * c + half), o, is_async=True)


@gluon.jit
def _load_pieces(run, local, key, LAYOUT: gl.constexpr):
    """Keys, in column pieces."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    exists = (key >= 0) & (key < run.tokens)
    rows = run.rows_of(local, gl.where(exists, key, 0), key * 0)[:, None] + column[None, :]
    pieces = ()
    for c in gl.static_range(PIECES):
        piece = gl.load(rows + c * COLUMNS, mask=exists[:, None], other=0.0)
        pieces = pieces + (piece,)  # noqa: RUF005
    return pieces


@gluon.jit
def _keep(tiles, marks, pieces, START: gl.constexpr, LAYOUT: gl.constexpr):
    """Store keys at rows ``START ..`` of tiles; returns whether one is not finite."""
    count: gl.constexpr = pieces[0].shape[0]
    mark = gl.zeros([count, COLUMNS], gl.float32, layout=LAYOUT)
    for c in gl.static_range(PIECES):
        mark += pieces[c].to(gl.float32) * 0.0
    mark = gl.sum(mark, 1)
    marks.slice(START, count, dim=0).store(mark)
    sound = mark == 0.0
    for c in gl.static_range(PIECES):
        kept = exchanged(gl.where(sound[:, None], pieces[c], 0.0), count, COLUMNS)
        tiles.index(c).slice(START, count, dim=0).store(kept)
    return 1 - gl.min(sound.to(gl.int32), 0)


@gluon.jit
def load_keys(run, local):
    """A run's keys, and whether any of them is marked."""
    dtype: gl.constexpr = local.pointer.dtype.element_ty
    main = gl.allocate_shared_memory(dtype, [PIECES, WINDOW, COLUMNS], KEYS)
    more = gl.allocate_shared_memory(dtype, [PIECES * 2, HALF, COLUMNS], KEYS)
    marks = gl.allocate_shared_memory(gl.float32, [WINDOW], LINE)
    more_marks = gl.allocate_shared_memory(gl.float32, [2, HALF], LINE)
    both = more._reinterpret(dtype, [PIECES, 2 * HALF, COLUMNS], KEYS)
    both_marks = more_marks._reinterpret(gl.float32, [2 * HALF], LINE)
    first = run.first - WINDOW
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, KEY_PIECE))
    more_row = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(1, MORE_PIECE))
    # All on their way before any is waited for.
    older = _load_pieces(run, local, first + HALF + row, KEY_PIECE)
    newer = _load_pieces(run, local, first + HALF + 64 + row, KEY_PIECE)
    ends = _load_pieces(run, local, first + more_row + more_row // HALF * WINDOW, MORE_PIECE)
    odd = _keep(main, marks, older, 0, KEY_PIECE)
    odd += _keep(main, marks, newer, 64, KEY_PIECE)
    odd += _keep(both, both_marks, ends, 0, MORE_PIECE)
    fence_async_shared()
    barrier()
    return Keys(main, more, marks, more_marks), odd


@gluon.jit
def with_marks(keys, odd, half, s, more):
    """Scores with their keys' marks added."""
    if odd > 0:
        s += keys.marks.load(gl.SliceLayout(0, SCORES))[None, :]
        more += keys.more_marks.index(half).load(gl.SliceLayout(0, MORE_SCORES))[None, :]
    return s, more


@gluon.jit
def sight(run, half, first_head, first_slot, LAYOUT: gl.constexpr, SLOTS: gl.constexpr):
    """Which of a product's keys its tile's rows see; slot n is the key ``first - 112 + n``."""
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    slot = first_slot + gl.arange(0, SLOTS, layout=gl.SliceLayout(0, LAYOUT))
    t, _, exists = run.row(half, first_head, row)
    last = t - run.first + (WINDOW - HALF)
    oldest = last - gl.where(exists, run.window_rows(t), 0)
    return (slot[None, :] <= last[:, None]) & (slot[None, :] > oldest[:, None])


@gluon.jit
def sights(run, half, first_head):
    """``sight`` of the 128 keys and of the 16."""
    first_slot = half * (WINDOW + HALF) - HALF
    more_seen = sight(run, half, first_head, first_slot, MORE_SCORES, HALF)
    return sight(run, half, first_head, 0, SCORES, WINDOW), more_seen
