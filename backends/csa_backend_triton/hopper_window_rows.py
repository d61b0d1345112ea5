# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Runs of 32 tokens, and the tiles of rows in them: what the window-only kernels share.

The windows of a run, of up to 128 keys each, cover 160 keys, from 128 before its first token on.
A tile is 16 of its tokens by 4 heads: 64 rows, row 16 h + t, that see 144 of the keys. The 128
in the middle belong to both halves of the run; the first 16 to its first half alone, the last 16
to its second. So a product with a tile's keys is one with 128 and one with 16 of them.

Runs begin anew in each batch entry, so that a token's results don't depend on its slot.
"""

from .gluon_compat import aggregate, gl, gluon

RUN = gl.constexpr(32)
HALF = gl.constexpr(16)
WINDOW = gl.constexpr(128)
GROUP = gl.constexpr(4)
TILE_ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(64)
PIECES = gl.constexpr(8)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
MORE_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
# Rows as a wgmma's left operand holds them, 8 neighbouring columns of 32 a thread.
PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
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
    def row(self, half, group, row):
        """Token and head of a tile's rows, and which of them exist."""
        t = self.first + half * HALF + row % HALF
        head = group * GROUP + row // HALF
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
    def sight(self, half, group, first_slot, LAYOUT: gl.constexpr, SLOTS: gl.constexpr):
        """Which of a product's keys its tile's rows see; slot n is the key ``first - 112 + n``."""
        row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
        slot = first_slot + gl.arange(0, SLOTS, layout=gl.SliceLayout(0, LAYOUT))
        t, _, exists = self.row(half, group, row)
        last = t - self.first + (WINDOW - HALF)
        oldest = last - gl.where(exists, self.window_rows(t), 0)
        return (slot[None, :] <= last[:, None]) & (slot[None, :] > oldest[:, None])

    @gluon.jit
    def sights(self, half, group):
        """``sight`` of the 128 keys and of the 16."""
        more_seen = self.sight(half, group, half * (WINDOW + HALF) - HALF, MORE_SCORES, HALF)
        return self.sight(half, group, 0, SCORES, WINDOW), more_seen


@gluon.jit
def run_of(START, start_b, start_t, heads, tokens, window, number):
    """The ``number``-th run of a call."""
    batch_runs = (tokens + (RUN - 1)) // RUN
    b, first = number // batch_runs, number % batch_runs * RUN
    return Run(START, start_b, start_t, heads, tokens, window, b, first)
