# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""A run's keys in shared memory, and the tiles that are multiplied by them.

Three warpgroups of forward and backward, synchronised by mbarriers alone, share these:

    two      each has the tiles of one half of the run: products, softmax and stores
    load     cp.async of the tiles' rows of query and upstream gradient

The eight pieces of 64 columns in shared memory are of one tile, or of the end of one and the
beginning of the next: a piece is handed over when its copies land, and comes back once it is in
registers, where wgmma takes it as its left operand. So one warpgroup's products, softmax and
stores run beside the other's loads, which limit these kernels.

Pieces in registers and accumulators alike hold in a thread columns 8 i + 2 q + e of 32
(i = 0..3, e = 0, 1), q being its place in its quad. For its eight columns to be neighbours in
memory, keys have the columns of each 32 exchanged in shared memory, column 8 q + 2 i + e where
8 i + 2 q + e was.

All 144 keys enter every product, unseen ones with weight 0, and 0 times NaN is NaN. So a row
that holds a NaN or Inf is kept as zeros, and a ``mark`` of NaN beside it, to be added to its
scores; other marks are 0.
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
from .hopper_tiles import barriers
from .hopper_window_rows import (
    COLUMNS,
    HALF,
    MORE_SCORES,
    PIECE,
    PIECES,
    SCORES,
    TILE_ROWS,
    WINDOW,
    exchanged,
)

FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
"""A run's halves."""

KEYS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Odd rows' halves of 32 columns exchanged: read, and written, without bank conflicts.
ROWS = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
MORE_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[16, 64],
    )
)
OF_SCORES = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
OF_MORE_SCORES = gl.constexpr(gl.DotOperandLayout(0, MORE_SCORES, 2))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OF_VALUES = gl.constexpr(gl.DotOperandLayout(0, VALUES, 2))


@aggregate
class Shared:
    """Keys and rows in shared memory in pieces of 64 columns, and the barriers of their handing.

    ``main`` is ``[8, 128, 64]``, ``more`` ``[8 * 2, 16, 64]``: piece c of the keys that belong to
    one half of the run alone is ``2 c + half``. ``full`` has a barrier for each half and piece of
    ``rows``, ``[8, 64, 64]``.
    """

    main: gl.shared_memory_descriptor
    more: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor
    more_marks: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, main, more, marks, more_marks, keys_full, rows, full, empty):
        self.main, self.more = main, more
        self.marks, self.more_marks = marks, more_marks
        self.keys_full = keys_full
        self.rows, self.full, self.empty = rows, full, empty

    @gluon.jit
    def load(self, run, query, upstream, first_group, last_group, TENSORS: gl.constexpr):
        """Copy all tiles' rows: of the query, with 2 ``TENSORS`` then of the upstream gradient."""
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, COPIED))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPIED))
        for group in range(first_group, last_group):
            for half in gl.static_range(2):
                t, head, exists = run.row(half, group, row)
                for n in gl.static_range(TENSORS):
                    tensor = query if n == 0 else upstream
                    source = run.rows_of(tensor, t, head)[:, None] + column[None, :]
                    for c in gl.static_range(PIECES):
                        mbarrier.wait(self.empty.index(c), (half * TENSORS + n + 1) % 2)
                        piece = self.rows.index(c)
                        copy_async(piece, source + c * COLUMNS, mask=exists[:, None])
                        full = self.full.index(half * PIECES + c)
                        arrive_when_copied(full, increment_count=False)

    @gluon.jit
    def keep_keys(self, run, local, HALF_OF: gl.constexpr):
        """Load half of the keys that both halves of the run see, and those of one half alone."""
        first = run.first - WINDOW
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, PIECE))
        more_row = gl.arange(0, HALF, layout=gl.SliceLayout(1, MORE_PIECE))
        # All on their way before any is waited for.
        pieces = _load_keys(run, local, first + HALF + HALF_OF * TILE_ROWS + row, PIECE)
        more_key = first + HALF_OF * (HALF + WINDOW) + more_row
        more_pieces = _load_keys(run, local, more_key, MORE_PIECE)
        tiles = ()
        more_tiles = ()
        for c in gl.static_range(PIECES):
            tile = self.main.index(c).slice(HALF_OF * TILE_ROWS, TILE_ROWS)
            tiles = tiles + (tile,)  # noqa: RUF005
            more_tiles = more_tiles + (self.more.index(2 * c + HALF_OF),)  # noqa: RUF005
        _keep(tiles, self.marks.slice(HALF_OF * TILE_ROWS, TILE_ROWS), pieces, PIECE)
        _keep(more_tiles, self.more_marks.index(HALF_OF), more_pieces, MORE_PIECE)
        fence_async_shared()
        mbarrier.arrive(self.keys_full.index(0), count=1)
        mbarrier.wait(self.keys_full.index(0), 0)

    @gluon.jit
    def scores(self, phase, zero, HALF_OF: gl.constexpr):
        """A tile's x K^T, ``[64, 128]`` and ``[64, 16]``, as soon as x is there.

        ``zero`` is 0, unknown to the compiler: ptxas hoists all descriptors otherwise, and spills.
        """
        s = gl.zeros([TILE_ROWS, WINDOW], gl.float32, layout=SCORES)
        more = gl.zeros([TILE_ROWS, HALF], gl.float32, layout=MORE_SCORES)
        for c in gl.static_range(PIECES):
            mbarrier.wait(self.full.index(HALF_OF * PIECES + c), phase)
            piece = self.rows.index(c).load(PIECE)
            mbarrier.arrive(self.empty.index(c), count=1)
            piece = exchanged(piece, TILE_ROWS, COLUMNS)
            x = gl.convert_layout(piece, OF_SCORES)
            keys = self.main.index(c + zero).permute((1, 0))
            s = warpgroup_mma(x, keys, s, use_acc=c > 0, is_async=True)
            x = gl.convert_layout(piece, OF_MORE_SCORES)
            keys = self.more.index(2 * c + HALF_OF + zero).permute((1, 0))
            more = warpgroup_mma(x, keys, more, use_acc=c > 0, is_async=True)
            # A piece stays in registers until its products are done.
            s, more = warpgroup_mma_wait(2 if c + 1 < PIECES else 0, deps=[s, more])
        return s, more

    @gluon.jit
    def marked(self, s, more, HALF_OF: gl.constexpr):
        """Scores with their keys' marks added."""
        s += self.marks.load(gl.SliceLayout(0, SCORES))[None, :]
        more += self.more_marks.index(HALF_OF).load(gl.SliceLayout(0, MORE_SCORES))[None, :]
        return s, more

    @gluon.jit
    def _weighted(self, weights, more_weights, c, HALF_OF: gl.constexpr):
        """Weights times column piece ``c`` of the keys, as an unfinished wgmma."""
        o = gl.zeros([TILE_ROWS, COLUMNS], gl.float32, layout=VALUES)
        o = warpgroup_mma(weights, self.main.index(c), o, use_acc=False, is_async=True)
        return warpgroup_mma(more_weights, self.more.index(2 * c + HALF_OF), o, is_async=True)

    @gluon.jit
    def store_weighted(
        self, run, tensor, group, weights, more_weights, factor, HALF_OF: gl.constexpr
    ):
        """Write a tile's rows: keys by weights, times each row's ``factor`` if it is not None."""
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, PIECE))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PIECE))
        t, head, exists = run.row(HALF_OF, group, row)
        target = run.rows_of(tensor, t, head)[:, None] + column[None, :]
        dtype: gl.constexpr = weights.dtype
        weights = gl.convert_layout(weights, OF_VALUES)
        more_weights = gl.convert_layout(more_weights, OF_VALUES)
        if factor is not None:
            factor = gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
        # Not unrolled: ptxas would have all products run ahead, and spill.
        for c in range(0, PIECES, 2):
            a = self._weighted(weights, more_weights, c, HALF_OF)
            b = self._weighted(weights, more_weights, c + 1, HALF_OF)
            a = warpgroup_mma_wait(2, deps=[a])
            a = a if factor is None else a * factor
            a = exchanged(a.to(dtype), TILE_ROWS, COLUMNS)
            gl.store(target + c * COLUMNS, gl.convert_layout(a, PIECE), mask=exists[:, None])
            b = warpgroup_mma_wait(0, deps=[b])
            b = b if factor is None else b * factor
            b = exchanged(b.to(dtype), TILE_ROWS, COLUMNS)
            b = gl.convert_layout(b, PIECE)
            gl.store(target + (c + 1) * COLUMNS, b, mask=exists[:, None])


@gluon.jit
def allocate(dtype: gl.constexpr):
    """The shared memory of a program."""
    return Shared(
        gl.allocate_shared_memory(dtype, [PIECES, WINDOW, COLUMNS], KEYS),
        gl.allocate_shared_memory(dtype, [PIECES * 2, HALF, COLUMNS], KEYS),
        gl.allocate_shared_memory(gl.float32, [WINDOW], LINE),
        gl.allocate_shared_memory(gl.float32, [2, HALF], LINE),
        barriers(1, 2),
        gl.allocate_shared_memory(dtype, [PIECES, TILE_ROWS, COLUMNS], ROWS),
        barriers(2 * PIECES, 128),
        barriers(PIECES, 1),
    )


@gluon.jit
def _load_keys(run, local, key, LAYOUT: gl.constexpr):
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
def _keep(tiles, marks, pieces, LAYOUT: gl.constexpr):
    """Store keys in ``tiles``, one a piece, and their marks; marked ones as zeros."""
    count: gl.constexpr = pieces[0].shape[0]
    mark = gl.zeros([count, COLUMNS], gl.float32, layout=LAYOUT)
    for c in gl.static_range(PIECES):
        mark += pieces[c].to(gl.float32) * 0.0
        tiles[c].store(exchanged(pieces[c], count, COLUMNS))
    mark = gl.sum(mark, 1)
    marks.store(mark)
    sound = mark == 0.0
    if gl.min(sound.to(gl.int32), 0) == 0:
        # Read again: bf16 pieces held until here would spill.
        for c in gl.static_range(PIECES):
            tiles[c].store(gl.where(sound[:, None], tiles[c].load(LAYOUT), 0.0))
