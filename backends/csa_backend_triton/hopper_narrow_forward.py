# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""Hopper forward, head_dim 128: one program computes [64 heads x 128] of the output per item.

The computation is that of ``hopper_forward``, over blocks of 128 keys: the window, at most 128
rows, is the first, the token's slots are the others. A narrow head needs little of everything,
so one warpgroup does it all and two programs share a multiprocessor: one's softmax runs under
the other's products. What limits it is instructions, so it avoids them:

- A program takes neighbouring tokens, one after another, and keeps the window in shared memory:
  row k of local_kv lies at place k mod 128. From one token to the next only the 16 places around
  the row that enters, and around the one that leaves, are copied anew. Rows that a token does
  not see are 0 there.
- Slots lie in a ring of two blocks, copied by cp.async while the block before is worked on, be it
  this token's or the next one's. The next Q comes with them, Q being kept in registers.
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
from .hopper_rescale import rescaled
from .hopper_softmax import (
    HEADS,
    LOWEST,
    SUMS,
    add_mass,
    load_sink,
    log_sum,
    weights,
    with_sink,
)
from .hopper_tiles import Rows, Token, Walk

WIDTH = gl.constexpr(128)
KEYS = gl.constexpr(128)
GROUP = gl.constexpr(16)

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
OUTPUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@aggregate
class Tiles:
    """An item's Q; the window and two blocks of slots, each with its keys' biases.

    ``window_groups`` is the window by halves of its columns and then by 16 rows.
    """

    q: gl.shared_memory_descriptor
    window: gl.shared_memory_descriptor
    window_groups: gl.shared_memory_descriptor
    window_bias: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, window, window_groups, window_bias, k, bias):
        self.q = q
        self.window = window
        self.window_groups = window_groups
        self.window_bias = window_bias
        self.k = k
        self.bias = bias


@gluon.jit
def _allocate(dtype: gl.constexpr):
    window = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], TILE)
    return Tiles(
        gl.allocate_shared_memory(dtype, [HEADS, WIDTH], TILE),
        window,
        window._reinterpret(dtype, [2 * KEYS // GROUP, GROUP, WIDTH // 2], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [KEYS // GROUP, GROUP], LINE),
        gl.allocate_shared_memory(dtype, [2, KEYS, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, KEYS], LINE),
    )


@gluon.jit
def _token(walk, item, end):
    """An item's token and its blocks of slots, at least one; past the end it sees nothing."""
    inside = item < end
    item = gl.minimum(item, walk.items - 1)
    at = item % walk.rows
    token = walk.token(at, item // walk.rows * HEADS)
    blocks = gl.load(walk.PLAN + at) - token.window_blocks
    return Token(
        token.b,
        token.t,
        token.first_head,
        token.index_row,
        token.slots,
        gl.where(inside, token.window_rows, 0),
        0 * token.t,
        token.pool_start,
        gl.where(inside, token.pool_length, 0),
        token.dense,
    ), gl.maximum((blocks + 1) // 2, 1)


@gluon.jit
def _copy_query(tiles, query, token, walk):
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    live = (head < walk.heads)[:, None]
    copy_async(tiles.q, query.heads(token, head, column), mask=live)


@gluon.jit
def _window_places(local, token, place):
    """Pointers to the first half of the rows at some places of a window; whether they are seen."""
    column = gl.arange(0, WIDTH // 2, layout=gl.SliceLayout(0, ROWS))
    age = (token.t - place) & (KEYS - 1)
    row = (token.t - age).to(gl.int64)
    source = local.batch(token) + (row * local.t * 8)[:, None] + column[None, :]
    return source, age < token.window_rows


@gluon.jit
def _bias(used):
    return gl.where(used, 0.0, float("-inf")).to(gl.bfloat16)


@gluon.jit
def _copy_group(tiles, local, token, group):
    """Start copying what the token sees of 16 places of its window, 0 for the rest."""
    place = group * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(1, ROWS))
    source, used = _window_places(local, token, place)
    copy_async(tiles.window_groups.index(group), source, mask=used[:, None])
    half = tiles.window_groups.index(KEYS // GROUP + group)
    copy_async(half, source + WIDTH // 2, mask=used[:, None])
    tiles.window_bias.index(group).store(_bias(used))


@gluon.jit
def _copy_window(tiles, local, token):
    """Start copying all of a token's window."""
    place = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    source, used = _window_places(local, token, place)
    left = tiles.window.slice(0, WIDTH // 2, dim=1)
    copy_async(left, source, mask=used[:, None])
    right = tiles.window.slice(WIDTH // 2, WIDTH // 2, dim=1)
    copy_async(right, source + WIDTH // 2, mask=used[:, None])
    tiles.window_bias._reinterpret(gl.bfloat16, [KEYS], LINE).store(_bias(used))


@gluon.jit
def _move_window(tiles, local, token, later):
    """Bring the window from one token's to the next one's."""
    grown = later.window_rows - token.window_rows
    if (later.t == token.t + 1) & ((grown == 0) | (grown == 1)):
        entered = (later.t & (KEYS - 1)) // GROUP
        left = ((later.t - later.window_rows) & (KEYS - 1)) // GROUP
        _copy_group(tiles, local, later, entered)
        if left != entered:
            _copy_group(tiles, local, later, left)
    else:
        _copy_window(tiles, local, later)


@gluon.jit
def _copy_slots(tiles, stage, pool, token, j, index, key):
    """Start copying a token's ``j``-th block of slots, unused ones as 0."""
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    used = (index >= 0) & (index < token.pool_length)
    row = (token.pool_start + index.to(gl.int32)).to(gl.int64)
    source = pool.batch(token) + (row * pool.t * 8)[:, None] + column[None, :]
    copy_async(tiles.k.index(stage), source, mask=used[:, None])
    tiles.bias.index(stage).store(_bias(used))


@gluon.jit
def _load_indices(token, later, j, blocks, key):
    """Indices of a token's ``j``-th block of slots or, past its last, the later one's first."""
    inside = j < blocks
    slot = gl.where(inside, j, 0) * KEYS + key
    index_row = gl.where(inside, token.index_row, later.index_row)
    if token.dense:  # noqa: SIM108
        index = slot
    else:
        index = gl.load(index_row + slot, mask=slot < token.slots, other=-1)
    return index


@gluon.jit
def _either(condition, token, later):
    return Token(
        gl.where(condition, token.b, later.b),
        token.t,
        token.first_head,
        token.index_row,
        token.slots,
        token.window_rows,
        token.window_blocks,
        gl.where(condition, token.pool_start, later.pool_start),
        gl.where(condition, token.pool_length, later.pool_length),
        token.dense,
    )


@gluon.jit
def _attend(s, bias, k, m, mass, acc, scale_log2):
    """Online softmax of a block, given its finished scores, and the products with its rows."""
    bias = bias.load(gl.SliceLayout(0, SCORES)).to(gl.float32)
    p, alpha, m = weights(s, bias, m, scale_log2)
    acc = rescaled(acc, alpha)
    operand = gl.convert_layout(p.to(k.dtype), OPERAND)
    acc = warpgroup_mma(operand, k, acc, is_async=True)
    mass = add_mass(mass, p, alpha)
    return m, mass, warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _store_output(out, tile, token, walk, acc, share):
    """Through the place of the last block of slots, for whole lines."""
    o = gl.where(share[:, None] == 0.0, 0.0, acc * share[:, None])
    barrier()
    tile.store(o.to(tile.dtype))
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUTPUT))
    place = out.heads(token, head, column)
    gl.store(place, tile.load(OUTPUT), mask=(head < walk.heads)[:, None])


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
    zeros = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)

    share_of_items = (items + gl.num_programs(0) - 1) // gl.num_programs(0)
    first = gl.program_id(0) * share_of_items
    end = gl.minimum(first + share_of_items, items)
    token, blocks = _token(walk, first, end)
    _copy_query(tiles, query, token, walk)
    _copy_window(tiles, local, token)
    commit_group()
    _copy_slots(tiles, 0, pool, token, 0, _load_indices(token, token, 0, 1, key), key)
    commit_group()

    block = 0
    for item in range(first, end):
        token, _ = _token(walk, item, end)
        later, blocks_later = _token(walk, item + 1, end)
        head = token.first_head + offs_h
        live = head < heads
        sink = load_sink(SINK, head, live)
        m = gl.full([HEADS], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
        mass = gl.zeros([HEADS, 8], gl.float32, layout=SUMS)
        acc = gl.zeros([HEADS, WIDTH], gl.float32, layout=SCORES)

        # Q and the window have landed.
        wait_group(1)
        barrier()
        fence_async_shared()
        q = tiles.q.load(OPERAND)
        s = warpgroup_mma(q, tiles.window.permute((1, 0)), zeros, use_acc=False, is_async=True)
        index = _load_indices(token, later, 1, blocks, key)
        s = warpgroup_mma_wait(0, deps=[s])
        bias = tiles.window_bias._reinterpret(gl.bfloat16, [KEYS], LINE)
        m, mass, acc = _attend(s, bias, tiles.window, m, mass, acc, scale_log2)
        # Everyone is done with both.
        barrier()
        if item + 1 < end:
            _copy_query(tiles, query, later, walk)
            _move_window(tiles, local, token, later)
        commit_group()

        for j in range(blocks):
            # Block j has landed, and everyone is done with block j - 1.
            wait_group(0)
            barrier()
            fence_async_shared()
            stage = (block + j) % 2
            k = tiles.k.index(stage)
            s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            source = _either(j + 1 < blocks, token, later)
            _copy_slots(tiles, 1 - stage, pool, source, j + 1, index, key)
            commit_group()
            index = _load_indices(token, later, j + 2, blocks, key)
            s = warpgroup_mma_wait(0, deps=[s])
            m, mass, acc = _attend(s, tiles.bias.index(stage), k, m, mass, acc, scale_log2)

        # A use of blocks besides the loop's bound: Triton 3.6.0 drops a carried scalar without.
        block += blocks
        blocks = blocks_later
        empty = (token.window_rows == 0) & (token.pool_length == 0)
        m, total, share = with_sink(m, mass, sink, empty)
        lse = log_sum(m, total, sink, empty)
        gl.store(LSE + walk.statistic(token, head), lse, mask=live)
        tile = tiles.k.index((block - 1) % 2).slice(0, HEADS, dim=0)
        _store_output(out, tile, token, walk, acc, share)
    wait_group(0)
