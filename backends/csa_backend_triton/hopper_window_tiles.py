# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""What the consumers of the window-only Hopper kernels share: their rows, products and layouts.

Query and upstream gradient reach them in halves, 64 rows of 256 columns, through one ring, in the
order of the items, which belong to the consumers in turn. Narrower pieces of rows, which lie far
apart, are read and written more slowly. While an item's halves are copied, the next item's rows
are fetched into the L2 cache: the ring alone holds too little to cover the memory's latency.
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
)
from .hopper_tiles import barriers
from .hopper_window_keys import COLUMNS, TILE

HEADS = gl.constexpr(64)
RING = gl.constexpr(2)
HALF = gl.constexpr(256)
HALF_TILES = gl.constexpr(4)
QUARTER = gl.constexpr(128)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
EXTRA_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, VALUES, 2))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Eight rows a thread: more would need more registers for addresses.
QUARTER_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# A row's 64 columns over 8 lanes, 16 bytes each, rows staying in the warp that computed them.
OUTPUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


@aggregate
class Tiles:
    """A ring of halves of items' rows, and its barriers.

    A barrier tells only whether an odd or an even round is over, so a consumer may wait for a
    half only when the one before has seen all of its own: they take turns, by ``turn``.
    """

    ring: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    consumers: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, full, empty, turn, consumers):
        self.ring = ring
        self.full = full
        self.empty = empty
        self.turn = turn
        self.consumers = gl.constexpr(consumers)

    @gluon.jit
    def fill(self, unit, pointer, live):
        """Copy the ``unit``-th half when its place has come back; ``pointer`` is to its left."""
        slot = unit % RING
        mbarrier.wait(self.empty.index(slot), ((unit // RING) & 1) ^ 1)
        for part in gl.static_range(2):
            tile = self.ring.index(slot).slice(part * QUARTER, QUARTER, dim=1)
            copy_async(tile, pointer + part * QUARTER, mask=live)
        arrive_when_copied(self.full.index(slot), increment_count=False)

    @gluon.jit
    def wait(self, unit):
        """The ``unit``-th half, when it has landed."""
        slot = unit % RING
        mbarrier.wait(self.full.index(slot), (unit // RING) & 1)
        fence_async_shared()
        return self.ring.index(slot)

    @gluon.jit
    def give_back(self, unit):
        """Say that the ``unit``-th half has been read."""
        mbarrier.arrive(self.empty.index(unit % RING), count=1)

    @gluon.jit
    def take_turn(self, i, CONSUMER: gl.constexpr):
        """Until all halves of item i - 1 have been seen, by the consumer it belongs to."""
        before: gl.constexpr = (CONSUMER + self.consumers - 1) % self.consumers
        phase = ((i - 1) // self.consumers) & 1
        mbarrier.wait(self.turn.index(before), phase, pred=i > 0)

    @gluon.jit
    def pass_turn(self, CONSUMER: gl.constexpr):
        """Say that all halves of this consumer's item have been seen."""
        mbarrier.arrive(self.turn.index(CONSUMER), count=1)


@aggregate
class Stored:
    """A chunk's P and dS, from flat token ``first``: by slot of the ring of keys, and transposed
    for its last 16 slots, ``[token, head block, 64, 128]`` and ``[token, head block, 16, 64]``.
    """

    p: gl.tensor
    extra_p: gl.tensor
    ds: gl.tensor
    extra_ds: gl.tensor
    first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, p, extra_p, ds, extra_ds, first):
        self.p = p
        self.extra_p = extra_p
        self.ds = ds
        self.extra_ds = extra_ds
        self.first = first

    @gluon.jit
    def place(self, run, flat, first_head):
        """Where an item's are, in items."""
        return ((flat - self.first) * run.head_blocks + first_head // 64).to(gl.int64)


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, CONSUMERS: gl.constexpr):
    """An empty ring of halves."""
    ring = gl.allocate_shared_memory(dtype, [RING, HEADS, HALF], TILE)
    return Tiles(ring, barriers(RING, 128), barriers(RING, 1), barriers(CONSUMERS, 1), CONSUMERS)


@gluon.jit
def add_scores(x, ring, zero, s, extra, PART: gl.constexpr):
    """Add x K^T over half ``PART``: ``[64, 128]`` and ``[64, 16]``, eight unfinished wgmma."""
    for c in gl.static_range(HALF_TILES):
        keys, extra_keys = ring.column_tile(PART * HALF_TILES + c + zero)
        tile = x.slice(c * COLUMNS, COLUMNS, dim=1)
        s = warpgroup_mma(tile, keys.permute((1, 0)), s, use_acc=PART + c > 0, is_async=True)
        extra_keys = extra_keys.permute((1, 0))
        extra = warpgroup_mma(tile, extra_keys, extra, use_acc=PART + c > 0, is_async=True)
    return s, extra


@gluon.jit
def weighted_keys(weights, extra_weights, ring, c):
    """Weights times column tile ``c`` of the keys, ``[64, 64]``, as an unfinished wgmma."""
    keys, extra_keys = ring.column_tile(c)
    nothing = gl.zeros([HEADS, COLUMNS], gl.float32, layout=VALUES)
    o = warpgroup_mma(weights, keys, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(extra_weights, extra_keys, o, is_async=True)


FETCH = gl.constexpr(
    "{ .reg .pred live; setp.ne.s32 live, $2, 0;"
    " @live cp.async.bulk.prefetch.L2.global [$1], 512; mov.b32 $0, 0; }"
)


@gluon.jit
def fetch(run, tensor, i):
    """Have an item's 64 rows of a tensor fetched into the L2 cache, half a row a thread."""
    half = gl.arange(0, 2 * HEADS, layout=LINE)
    flat, first_head = run.item(i)
    head = first_head + half // 2
    live = (head < run.heads) & (i < run.items())
    b, t = (flat // run.tokens).to(gl.int64), (flat % run.tokens).to(gl.int64)
    rows = tensor.pointer + b * tensor.b * 8 + t * tensor.t * 8
    rows += head.to(gl.int64) * tensor.h * 8 + half % 2 * HALF
    gl.inline_asm_elementwise(
        FETCH,
        "=r,l,r",
        [rows.to(gl.int64, bitcast=True), live.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
