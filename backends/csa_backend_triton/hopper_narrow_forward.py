# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper forward, head_dim 128: one program computes [64 heads x 128] of the output per item.

The computation is that of ``hopper_forward``. A narrow head needs little of everything, so one
warpgroup does it all and two programs share a multiprocessor: one's softmax runs under the
other's products. Each is persistent and keeps its loads going across items by cp.async: while a
key block is worked on the next one is on its way, be it this item's or the next one's, and with
the next item's first block comes its Q.
"""

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
from .hopper_forward import OUTPUT, VALUES
from .hopper_narrow_tiles import ROWS, TILE, WIDTH, block_of, copy_heads, copy_keys, token_of
from .hopper_rescale import rescaled
from .hopper_softmax import (
    HEADS,
    KEYS,
    LOWEST,
    SCORES,
    SUMS,
    add_mass,
    load_sink,
    log_sum,
    weights,
    with_sink,
)
from .hopper_tiles import Rows, Walk

STAGES = gl.constexpr(2)

WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, VALUES, 2))


@aggregate
class Tiles:
    """Two key blocks with the keys' biases, and two items' Q."""

    k: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, bias, q):
        self.k = k
        self.bias = bias
        self.q = q


@gluon.jit
def _allocate(dtype: gl.constexpr):
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Tiles(
        gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], TILE),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], line),
        gl.allocate_shared_memory(dtype, [2, HEADS, WIDTH], TILE),
    )


@gluon.jit
def _copy_block(tiles, slot, token, j, index, local, pool):
    used, _, _ = copy_keys(tiles.k.index(slot), token, j, index, local, pool)
    tiles.bias.index(slot).store(gl.where(used, 0.0, float("-inf")))


@gluon.jit
def _copy_query(tiles, slot, query, token, item, walk):
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    live = (head < walk.heads) & (item < walk.items)
    copy_heads(tiles.q.index(slot), query, token, live)


@gluon.jit
def _store_output(out, token, walk, acc, share):
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUTPUT))
    share = gl.convert_layout(share, gl.SliceLayout(1, VALUES))
    o = gl.where(share[:, None] == 0.0, 0.0, acc * share[:, None])
    o = gl.convert_layout(o.to(out.pointer.dtype.element_ty), OUTPUT)
    gl.store(out.heads(token, head, column), o, mask=(head < walk.heads)[:, None])


STRIDES = tuple(f"{name}_{dim}" for name in ("query", "local", "pool", "out") for dim in "bht")
SIZES = ("indices_b", "indices_t", "heads", "tokens", "slots", "rows", "items")


@gluon.jit(do_not_specialize=(*STRIDES, *SIZES))
def forward_kernel(
    Q,
    query_b,
    query_h,
    query_t,
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
    PLAN,
    INDICES,
    indices_b,
    indices_t,
    heads,
    tokens,
    slots,
    rows,
    items,
    SINK,
    LSE,
    scale_log2,
    DENSE: gl.constexpr,
):
    """Strides of query, KV and out are in units of 8 elements, of indices in elements."""
    tiles = _allocate(Q.dtype.element_ty)
    walk = Walk(
        PLAN, INDICES, indices_b, indices_t, heads, tokens, slots, rows, items, None, DENSE
    )
    query = Rows(Q, query_b, query_h, query_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    pool = Rows(POOL, pool_b, pool_h, pool_t)
    out = Rows(OUT, out_b, out_h, out_t)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))

    first = gl.program_id(0)
    token, blocks = token_of(walk, first, False)
    _copy_query(tiles, 0, query, token, first, walk)
    _copy_block(tiles, 0, token, 0, token.load_indices(0, key), local, pool)
    commit_group()
    index = token.load_indices(1, key)

    block = 0
    count = 0
    for item in range(first, items, gl.num_programs(0)):
        following = item + gl.num_programs(0)
        token, _ = token_of(walk, item, False)
        later, blocks_later = token_of(walk, following, False)
        head = token.first_head + offs_h
        live = head < heads
        sink = load_sink(SINK, head, live)
        m = gl.full([HEADS], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
        mass = gl.zeros([HEADS, 8], gl.float32, layout=SUMS)
        acc = gl.zeros([HEADS, WIDTH], gl.float32, layout=VALUES)
        q = tiles.q.index(count % 2)
        for j in range(blocks):
            # Block j has landed, and everyone is done with block j - 1, whose place comes next.
            wait_group(0)
            barrier()
            fence_async_shared()
            slot = (block + j) % STAGES
            bias = tiles.bias.index(slot).load(gl.SliceLayout(0, SCORES))
            s = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)
            k = tiles.k.index(slot).permute((1, 0))
            s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)

            source, ahead = block_of(j + 1, blocks, token, later)
            _copy_block(tiles, (slot + 1) % STAGES, source, ahead, index, local, pool)
            if j + 1 == blocks:
                _copy_query(tiles, (count + 1) % 2, query, later, following, walk)
            commit_group()
            source, ahead = block_of(j + 2, blocks, token, later)
            index = source.load_indices(ahead, key)

            s = warpgroup_mma_wait(0, deps=[s])
            p, alpha, m = weights(s, bias, m, scale_log2)
            mass = add_mass(mass, p, alpha)
            acc = rescaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, VALUES)))
            p = gl.convert_layout(p.to(tiles.k.dtype), WEIGHTS)
            acc = warpgroup_mma(p, tiles.k.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])

        # A use of blocks besides the loop's bound: Triton 3.6.0 drops a carried scalar without.
        block += blocks
        blocks = blocks_later
        count += 1  # noqa: SIM113
        empty = (token.window_rows == 0) & (token.pool_length == 0)
        m, total, share = with_sink(m, mass, sink, empty)
        lse = log_sum(m, total, sink, empty)
        gl.store(LSE + walk.statistic(token, head), lse, mask=live)
        _store_output(out, token, walk, acc, share)
    wait_group(0)
