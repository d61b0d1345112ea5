# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper backward, head_dim 128: dQ [64 heads x 128] per item, and dKV by vector atomics.

The computation and the order of items are those of ``hopper_backward``. A narrow head needs
little of everything, so one warpgroup does it all and two programs share a multiprocessor: one's
reductions run under the other's products. Each is persistent and keeps its loads going across
items by cp.async: while a key block is worked on the next one is on its way, be it this item's
or the next one's, and with the next item's first block come its Q and dO.
"""

from triton.language import PropagateNan

from .gluon_compat import (
    aggregate,
    barrier,
    commit_group,
    fence_async_shared,
    gl,
    gluon,
    wait_group,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_backward_scatter import QUADS, add_rows
from .hopper_backward_scatter import TILE as SUMS
from .hopper_narrow_tiles import (
    HEADS,
    KEYS,
    ROWS,
    TILE,
    WIDTH,
    block_of,
    copy_heads,
    copy_keys,
    token_of,
)
from .hopper_tiles import Rows, Walk

ALL = gl.constexpr(PropagateNan.ALL)
LOG2E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)
HALF = gl.constexpr(64)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@aggregate
class Tiles:
    """Two key blocks with what ``_copy_block`` says of them, two items' Q and dO, P and dS."""

    k: gl.shared_memory_descriptor
    offset: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, offset, q, do, p, ds):
        self.k = k
        self.offset = offset
        self.q = q
        self.do = do
        self.p = p
        self.ds = ds


@gluon.jit
def _allocate(dtype: gl.constexpr):
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Tiles(
        gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], TILE),
        gl.allocate_shared_memory(gl.int32, [STAGES, KEYS], line),
        gl.allocate_shared_memory(dtype, [2, HEADS, WIDTH], TILE),
        gl.allocate_shared_memory(dtype, [2, HEADS, WIDTH], TILE),
        gl.allocate_shared_memory(dtype, [HEADS, KEYS], TILE),
        gl.allocate_shared_memory(dtype, [HEADS, KEYS], TILE),
    )


@gluon.jit
def _copy_block(
    tiles,
    slot,
    token,
    j,
    index,
    walk,
    local,
    pool,
    pool_rows,
    LOCAL_GRADIENT: gl.constexpr,
    POOL_GRADIENT: gl.constexpr,
):
    """Start copying a key block; note where its keys' sums lie, negative if unwanted."""
    wanted, row, in_window = copy_keys(tiles.k.index(slot), token, j, index, local, pool)
    if not LOCAL_GRADIENT:
        wanted = wanted & (not in_window)
    if not POOL_GRADIENT:
        wanted = wanted & in_window
    start = gl.where(in_window, token.b * walk.tokens, walk.rows + token.b * pool_rows)
    tiles.offset.index(slot).store(gl.where(wanted, (start + row) * WIDTH, -WIDTH))


@gluon.jit
def _row_offsets(own, odd):
    """Offsets of the even and the odd row of each pair of rows, whose lanes are 4 apart."""
    other = gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 4, 31, -1;",
        "=r,r",
        [own],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return gl.where(odd, other, own), gl.where(odd, own, other)


@gluon.jit
def _live(token, walk):
    """Heads to read; none of a token that sees no key."""
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    return (head < walk.heads) & ((token.window_rows > 0) | (token.pool_length > 0))


@gluon.jit
def _load_output(out, token, walk):
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    return gl.load(out.heads(token, head, column), mask=_live(token, walk)[:, None], other=0.0)


@gluon.jit
def _store_query_gradient(gradient, tile, token, walk, dq):
    """Through the place of the item's Q, for whole lines."""
    barrier()
    tile.store(dq.to(tile.dtype))
    barrier()
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    place = gradient.heads(token, head, column)
    gl.store(place, tile.load(ROWS), mask=(head < walk.heads)[:, None])


@gluon.jit
def _key_gradient(p, ds, q, do, nothing, C: gl.constexpr):
    """A block's dKV, columns 64 C to 64 C + 63, as an unfinished wgmma."""
    part = do.slice(C * HALF, HALF, dim=1)
    tile = warpgroup_mma(p.permute((1, 0)), part, nothing, use_acc=False, is_async=True)
    part = q.slice(C * HALF, HALF, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), part, tile, is_async=True)


STRIDES = tuple(
    f"{x}_{dim}" for x in ("query", "do", "local", "pool", "out", "dq") for dim in "bht"
)
SIZES = ("indices_b", "indices_t", "heads", "tokens", "slots", "rows", "items", "pool_rows")


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES))
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
    scale,
    scale_log2,
    QUERY_GRADIENT: gl.constexpr,
    LOCAL_GRADIENT: gl.constexpr,
    POOL_GRADIENT: gl.constexpr,
    DENSE: gl.constexpr,
):
    """As in ``hopper_backward``, DKV being ``[B * T + B * S, 128]``."""
    tiles = _allocate(Q.dtype.element_ty)
    walk = Walk(
        PLAN, INDICES, indices_b, indices_t, heads, tokens, slots, rows, items, None, DENSE
    )
    query = Rows(Q, query_b, query_h, query_t)
    upstream = Rows(DO, do_b, do_h, do_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    pool = Rows(POOL, pool_b, pool_h, pool_t)
    out = Rows(OUT, out_b, out_h, out_t)
    gradient = Rows(DQ, dq_b, dq_h, dq_t)

    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, QUADS))
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, QUADS))
    is_odd = (row & 1) == 1
    lane = ((row & 1) * 16)[:, None] + (quad * 4)[None, :]
    odd = (row & 1)[:, None] + (quad * 0)[None, :]
    nothing = gl.zeros([KEYS, HALF], gl.float32, layout=SUMS)

    first = gl.program_id(0)
    token, blocks = token_of(walk, first, True)
    copy_heads(tiles.q.index(0), query, token, _live(token, walk))
    copy_heads(tiles.do.index(0), upstream, token, _live(token, walk))
    index = token.load_indices(0, key)
    _copy_block(
        tiles, 0, token, 0, index, walk, local, pool, pool_rows, LOCAL_GRADIENT, POOL_GRADIENT
    )
    commit_group()
    index = token.load_indices(1, key)
    o = _load_output(out, token, walk)

    block = 0
    count = 0
    for item in range(first, items, gl.num_programs(0)):
        token, _ = token_of(walk, item, True)
        later, blocks_later = token_of(walk, item + gl.num_programs(0), True)
        q = tiles.q.index(count % 2)
        do = tiles.do.index(count % 2)
        seen = (token.window_rows > 0) | (token.pool_length > 0)
        head = token.first_head + offs_h
        live = (head < heads) & seen
        # Rows that are not read get P = 0.
        lse = gl.load(LSE + walk.statistic(token, head), mask=live, other=float("inf")) * LOG2E
        dq = gl.zeros([HEADS, WIDTH], gl.float32, layout=QUERIES)

        wait_group(0)
        barrier()
        products = o.to(gl.float32) * do.load(ROWS).to(gl.float32)
        delta = gl.convert_layout(gl.sum(products, 1), gl.SliceLayout(1, SCORES))
        gl.store(DELTA + walk.statistic(token, head), delta, mask=live)
        for j in range(blocks):
            # Block j has landed, and everyone is done with block j - 1, whose place comes next.
            wait_group(0)
            barrier()
            fence_async_shared()
            slot = (block + j) % STAGES
            offset = tiles.offset.index(slot).load(gl.SliceLayout(1, QUADS))
            even, uneven = _row_offsets(offset, is_odd)
            even = even[:, None] + lane
            uneven = uneven[:, None] + lane
            zeros = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)
            k = tiles.k.index(slot)
            s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(do, k.permute((1, 0)), zeros, use_acc=False, is_async=True)

            source, ahead = block_of(j + 1, blocks, token, later)
            _copy_block(
                tiles,
                (slot + 1) % STAGES,
                source,
                ahead,
                index,
                walk,
                local,
                pool,
                pool_rows,
                LOCAL_GRADIENT,
                POOL_GRADIENT,
            )
            if j + 1 == blocks:
                copy_heads(tiles.q.index((count + 1) % 2), query, later, _live(later, walk))
                copy_heads(tiles.do.index((count + 1) % 2), upstream, later, _live(later, walk))
            commit_group()
            source, ahead = block_of(j + 2, blocks, token, later)
            index = source.load_indices(ahead, key)

            s = warpgroup_mma_wait(1, deps=[s])
            # At most 0 for used slots but for rounding; unused ones may have any finite value.
            s = s * scale_log2 - lse[:, None]
            p = gl.exp2(gl.minimum(s, 0.0, propagate_nan=ALL))
            tiles.p.store(p.to(tiles.p.dtype))
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = p * (dp - delta[:, None]) * scale
            tiles.ds.store(ds.to(tiles.ds.dtype))
            fence_async_shared()
            barrier()
            dkv0 = _key_gradient(tiles.p, tiles.ds, q, do, nothing, 0)
            dkv1 = _key_gradient(tiles.p, tiles.ds, q, do, nothing, 1)
            dq = warpgroup_mma(tiles.ds, k, dq, is_async=True)
            dkv0 = warpgroup_mma_wait(3, deps=[dkv0])
            base = (DKV + even * 0).to(gl.int64, bitcast=True)
            add_rows(dkv0, base, even, uneven, odd)
            dkv1 = warpgroup_mma_wait(1, deps=[dkv1])
            add_rows(dkv1, base + HALF * 4, even, uneven, odd)
            dq = warpgroup_mma_wait(0, deps=[dq])
        # A use of blocks besides the loop's bound: Triton 3.6.0 drops a carried scalar without.
        block += blocks
        blocks = blocks_later
        count += 1  # noqa: SIM113
        o = _load_output(out, later, walk)
        if QUERY_GRADIENT:
            _store_query_gradient(gradient, q, token, walk, dq)
    wait_group(0)
