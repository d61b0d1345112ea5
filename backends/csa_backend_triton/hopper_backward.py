# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Hopper backward, head_dim 512: dQ [64 heads x 512] per item, and dKV by vector atomics.

An item is (token t, 64 heads of it), taken round robin by persistent programs. With Q and
dO [64, 512] in shared memory, for each of the token's key blocks of 64 rows K [64, 512]:

    P  = exp2(scale log2e Q K^T - lse)      dS = scale P (dO K^T - delta)
    dQ += dS K                              dKV rows += P^T dO + dS^T Q

with delta = rowsum(out * dO), which is also written out, for the sink's gradient.

Four warpgroups, synchronised by mbarriers alone:

    weights     S and P, and columns 0..255 of dQ
    gradients   dP and dS, and columns 256..511 of dQ; delta, while the first dP runs
    scatter     dKV of the block in 64-column chunks, added to the fp32 buffer
                (``hopper_backward_scatter``)
    gather      cp.async of K rows, zero-filling unused slots, and of Q and dO
                (``hopper_backward_gather``)

K lives in a ring of five 128-column chunks, freed as soon as their dQ piece is done, in the
order 0, 2, 1, 3 so that both dQ warpgroups free one in turn. P of an unused slot is not masked:
its K is 0, so it adds nothing to dQ, and its dKV is not scattered.

A token without keys has no blocks: nothing of it is loaded, and its dQ is stored as 0.
Tokens are visited so that programs that run together are far apart, and their windows don't
collide in the atomics.
"""

from triton.language import PropagateNan

from .gluon_compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_backward_gather import CHUNK, CHUNK_ORDER, KEYS, ROWS, SLOTS, gather, ring_slot
from .hopper_backward_scatter import scatter
from .hopper_backward_store import store
from .hopper_tiles import Rows, Walk, barriers

HEADS = gl.constexpr(64)
ALL = gl.constexpr(PropagateNan.ALL)
LOG2E = gl.constexpr(1.4426950408889634)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PARTS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))


@aggregate
class Shared:
    """Tiles in shared memory and the barriers that hand them over.

    P and dS come back together, by ``p_empty``. So do Q and dO by ``qdo_empty``, whole or in
    four parts of 128 columns.
    """

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    qdo_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, item_barriers, k_barriers, block_barriers):
        self.q, self.do, self.k, self.p, self.ds = tiles
        self.q_full, self.do_full, self.qdo_empty = item_barriers
        self.k_full, self.k_empty = k_barriers
        self.p_full, self.ds_full, self.p_empty = block_barriers


@gluon.jit
def _allocate(dtype: gl.constexpr, PARTS: gl.constexpr):
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(dtype, [1, HEADS, 512], tile)
    do = gl.allocate_shared_memory(dtype, [1, HEADS, 512], tile)
    k = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, CHUNK], tile)
    p = gl.allocate_shared_memory(dtype, [1, HEADS, KEYS], tile)
    ds = gl.allocate_shared_memory(dtype, [1, HEADS, KEYS], tile)
    # Copies arrive once a thread of the gather warpgroup, everything else once a warpgroup.
    return Shared(
        (q, do, k, p, ds),
        (barriers(1, 128), barriers(1, 128), barriers(PARTS, 3)),
        (barriers(SLOTS, 128), barriers(SLOTS, 1)),
        (barriers(1, 1), barriers(1, 1), barriers(1, 1)),
    )


@gluon.jit
def _products(x, shared, block):
    """x K^T for x = Q or dO, [64 heads, 64 keys], as an unfinished wgmma."""
    s = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)
    # A run-time zero: without it ptxas hoists every tile's descriptors and spills them.
    zero = block >> 28
    for g in gl.static_range(4):
        slot, phase = ring_slot(block, g)
        mbarrier.wait(shared.k_full.index(slot), phase)
        fence_async_shared()
        k = shared.k.index(slot + zero).permute((1, 0))
        part = x.index(zero).slice(CHUNK_ORDER[g] * CHUNK, CHUNK, dim=1)
        s = warpgroup_mma(part, k, s, use_acc=g > 0, is_async=True)
    return s


@gluon.jit
def _add_query_gradient(dq0, dq1, shared, block, FIRST: gl.constexpr):
    """Add dS K for this warpgroup's two chunks of K, freeing each when it is done."""
    slot0, _ = ring_slot(block, FIRST)
    slot1, _ = ring_slot(block, FIRST + 2)
    zero = block >> 28
    ds = shared.ds.index(0)
    dq0 = warpgroup_mma(ds, shared.k.index(slot0 + zero), dq0, is_async=True)
    dq1 = warpgroup_mma(ds, shared.k.index(slot1 + zero), dq1, is_async=True)
    dq0 = warpgroup_mma_wait(1, deps=[dq0])
    mbarrier.arrive(shared.k_empty.index(slot0), count=1)
    dq1 = warpgroup_mma_wait(0, deps=[dq1])
    mbarrier.arrive(shared.k_empty.index(slot1), count=1)
    return dq0, dq1


@gluon.jit
def _store_query_gradient(gradient, walk, at, first_head, dq0, dq1, HALF: gl.constexpr):
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERIES))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, QUERIES))
    place = gradient.heads(walk.place(at, first_head), head, column) + 2 * HALF * CHUNK
    live = (head < walk.heads)[:, None]
    dtype: gl.constexpr = gradient.pointer.dtype.element_ty
    gl.store(place, dq0.to(dtype), mask=live)
    gl.store(place + CHUNK, dq1.to(dtype), mask=live)


@gluon.jit
def _weights(
    walk, shared, LSE, gradient, scale_log2, QUERY_GRADIENT: gl.constexpr, PARTS: gl.constexpr
):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    block = 0
    count = 0
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, first_head = walk.spread(item)
        blocks = gl.load(walk.PLAN + at)
        head = first_head + offs_h
        place = LSE + walk.statistic(walk.place(at, first_head), head)
        # Rows past the last head get P = 0.
        lse = gl.load(place, mask=head < walk.heads, other=float("inf")) * LOG2E
        dq0 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        dq1 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        mbarrier.wait(shared.q_full.index(0), count & 1, pred=blocks > 0)
        for _ in range(blocks):
            phase = block & 1
            s = _products(shared.q, shared, block)
            s = warpgroup_mma_wait(0, deps=[s])
            # At most 0 for used slots but for rounding; unused ones may have any finite value.
            s = s * scale_log2 - lse[:, None]
            p = gl.exp2(gl.minimum(s, 0.0, propagate_nan=ALL))
            mbarrier.wait(shared.p_empty.index(0), phase ^ 1)
            shared.p.index(0).store(p.to(shared.p.dtype))
            fence_async_shared()
            mbarrier.arrive(shared.p_full.index(0), count=1)
            mbarrier.wait(shared.ds_full.index(0), phase)
            dq0, dq1 = _add_query_gradient(dq0, dq1, shared, block, 0)
            block += 1
        for part in gl.static_range(PARTS):
            mbarrier.arrive(shared.qdo_empty.index(part), count=1, pred=blocks > 0)
        if QUERY_GRADIENT:
            _store_query_gradient(gradient, walk, at, first_head, dq0, dq1, 0)
        count += (blocks > 0).to(gl.int32)


@gluon.jit
def _chunk_products(o, do, C: gl.constexpr):
    """Partial sums over a chunk's columns of out * dO, ``[64 heads, 16]``."""
    g = do.index(0).slice(C * CHUNK, CHUNK, dim=1).load(ROWS)
    products = (o.to(gl.float32) * g.to(gl.float32)).reshape([HEADS, 16, 8])
    return gl.convert_layout(gl.sum(products, 2), PARTS)


@gluon.jit
def _add_gradients(dp, delta, dq0, dq1, shared, scale, block):
    """dS of a block from dP, handed over, and its part of dQ."""
    phase = block & 1
    mbarrier.wait(shared.p_full.index(0), phase)
    p = shared.p.index(0).load(SCORES).to(gl.float32)
    ds = p * (dp - delta[:, None]) * scale
    shared.ds.index(0).store(ds.to(shared.ds.dtype))
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(0), count=1)
    return _add_query_gradient(dq0, dq1, shared, block, 1)


@gluon.jit
def _gradients(
    walk, shared, out, DELTA, gradient, scale, QUERY_GRADIENT: gl.constexpr, PARTS: gl.constexpr
):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))
    block = 0
    count = 0
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, first_head = walk.spread(item)
        blocks = gl.load(walk.PLAN + at)
        dq0 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        dq1 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        if blocks > 0:
            token = walk.place(at, first_head)
            head = first_head + offs_h
            live = head < walk.heads
            rows = out.heads(token, head, column)
            # All on their way while the last item's dO is still in use.
            o0 = gl.load(rows, mask=live[:, None], other=0.0)
            o1 = gl.load(rows + CHUNK, mask=live[:, None], other=0.0)
            o2 = gl.load(rows + 2 * CHUNK, mask=live[:, None], other=0.0)
            o3 = gl.load(rows + 3 * CHUNK, mask=live[:, None], other=0.0)
            mbarrier.wait(shared.do_full.index(0), count & 1)
            dp = _products(shared.do, shared, block)
            # delta, under the first dP.
            parts = _chunk_products(o0, shared.do, 0) + _chunk_products(o1, shared.do, 1)
            parts += _chunk_products(o2, shared.do, 2) + _chunk_products(o3, shared.do, 3)
            row_delta = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, ROWS))
            gl.store(DELTA + walk.statistic(token, head), row_delta, mask=live)
            delta = gl.convert_layout(row_delta, gl.SliceLayout(1, SCORES))
            dp = warpgroup_mma_wait(0, deps=[dp])
            dq0, dq1 = _add_gradients(dp, delta, dq0, dq1, shared, scale, block)
            for j in range(1, blocks):
                dp = _products(shared.do, shared, block + j)
                dp = warpgroup_mma_wait(0, deps=[dp])
                dq0, dq1 = _add_gradients(dp, delta, dq0, dq1, shared, scale, block + j)
            for part in gl.static_range(PARTS):
                mbarrier.arrive(shared.qdo_empty.index(part), count=1)
            count += 1
        block += blocks
        if QUERY_GRADIENT:
            _store_query_gradient(gradient, walk, at, first_head, dq0, dq1, 1)


STRIDES = tuple(
    f"{x}_{dim}" for x in ("query", "do", "local", "pool", "out", "dq") for dim in "bht"
)
SIZES = ("indices_b", "indices_t", "heads", "tokens", "slots", "rows", "items", "pool_rows")
ORDERED = ("first_row", "places", "window_blocks")


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES, *ORDERED))
def backward_kernel(
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
    POOL,
    pool_b,
    pool_h,
    pool_t,
    OUT,
    out_b,
    out_h,
    out_t,
    DQ,
    dq_b,
    dq_h,
    dq_t,
    PLAN,
    INDICES,
    indices_b,
    indices_t,
    heads,
    tokens,
    slots,
    rows,
    items,
    LSE,
    DELTA,
    DKV,
    pool_rows,
    first_row,
    places,
    window_blocks,
    scale,
    scale_log2,
    QUERY_GRADIENT: gl.constexpr,
    LOCAL_GRADIENT: gl.constexpr,
    POOL_GRADIENT: gl.constexpr,
    DENSE: gl.constexpr,
    PARTS: gl.constexpr,
    MATRIX_REGISTERS: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr,
):
    """Strides of query, dO, KV and dQ are in units of 8 elements, of indices in elements.

    DKV is fp32 ``[B * T + B * S, 512]``, local rows first, its columns permuted within each 16
    (``hopper_backward_scatter``). DELTA is written for tokens that see keys.
    """
    shared = _allocate(Q.dtype.element_ty, PARTS)
    walk = Walk(
        PLAN, INDICES, indices_b, indices_t, heads, tokens, slots, rows, items, first_row, DENSE
    )
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    pool = Rows(POOL, pool_b, pool_h, pool_t)
    out = Rows(OUT, out_b, out_h, out_t)
    gradient = Rows(DQ, dq_b, dq_h, dq_t)
    gl.warp_specialize(
        [
            (scatter, (walk, shared, DKV, pool_rows, LOCAL_GRADIENT, POOL_GRADIENT, PARTS))
            if first_row is None
            else (store, (walk, shared, DKV, places, window_blocks)),
            (_weights, (walk, shared, LSE, gradient, scale_log2, QUERY_GRADIENT, PARTS)),
            (_gradients, (walk, shared, out, DELTA, gradient, scale, QUERY_GRADIENT, PARTS)),
            (gather, (walk, shared, query, upstream, local, pool, PARTS)),
        ],
        [4, 4, 4],
        [MATRIX_REGISTERS, MATRIX_REGISTERS, GATHER_REGISTERS],
    )
