# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Hopper forward, head_dim 512: one program computes [64 heads x 512] of the output per item.

An item is (token t, 64 heads of it); persistent programs take items round robin. Over the
token's key blocks of 64 rows (its window first, then its slots), with Q [64, 512] and
one K = V block [64, 512] in shared memory:

    S = Q K^T        m' = max(m, rowmax S)      P = exp2(S - m')      a = exp2(m - m')
    l = a l + rowsum P                          O = a O + P K

and at the end out = O / (l + exp2(sink - m)), lse = m + log(l + exp2(sink - m)), S and m being in
log2 units. The running maximum is lazy (``hopper_softmax``).

Four warpgroups, synchronised by mbarriers alone:

    scores    S by wgmma, P and a to shared memory, the row sums, lse
    values    twice: each owns two of O's four 128-column chunks, O by wgmma
    gather    cp.async of K rows, zero-filling unused slots, and of the next item's Q

K lives in a ring of two blocks of four 128-column chunks. A chunk is handed over when its copies
land and comes back as soon as its part of P K is done, which shortens the serial chain
gather -> S -> P -> O that limits this kernel.
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
from .hopper_tiles import Rows, Walk, barriers

CHUNKS = gl.constexpr(4)
CHUNK = gl.constexpr(128)

VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
# A row's 128 columns over 16 lanes, 16 bytes each, rows staying in the warp that computed them.
OUTPUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
# Four rows a thread: eight would need more registers for addresses.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@aggregate
class Shared:
    """Tiles in shared memory and the barriers that hand them over."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    alpha: gl.shared_memory_descriptor
    final: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    final_full: gl.shared_memory_descriptor
    final_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, q_barriers, k_barriers, p_barriers, final_barriers):
        self.q, self.k, self.p, self.alpha, self.final = tiles
        self.q_full, self.q_empty = q_barriers
        self.k_full, self.k_empty = k_barriers
        self.p_full, self.p_empty = p_barriers
        self.final_full, self.final_empty = final_barriers


@gluon.jit
def _allocate(dtype: gl.constexpr):
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [CHUNKS, HEADS, CHUNK], tile)
    k = gl.allocate_shared_memory(dtype, [2 * CHUNKS, KEYS, CHUNK], tile)
    p = gl.allocate_shared_memory(dtype, [2, HEADS, KEYS], tile)
    alpha = gl.allocate_shared_memory(gl.float32, [2, HEADS], line)
    final = gl.allocate_shared_memory(gl.float32, [2, HEADS], line)
    # Copies arrive once a thread of the gather warpgroup, everything else once a warpgroup.
    return Shared(
        (q, k, p, alpha, final),
        (barriers(CHUNKS, 128), barriers(1, 1)),
        (barriers(2 * CHUNKS, 128), barriers(2 * CHUNKS, 1)),
        (barriers(2, 1), barriers(2, 2)),
        (barriers(2, 1), barriers(2, 2)),
    )


@gluon.jit
def _block_rows(local, pool, token, row, in_window):
    """Pointers to the first chunk of a key block's 64 rows."""
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))
    step = gl.where(in_window, local.t, pool.t)
    source = gl.where(in_window, local.batch(token), pool.batch(token))
    return source + (row.to(gl.int64) * step * 8)[:, None] + column[None, :]


@gluon.jit
def _copy_chunk(shared, source, used, block, c: gl.constexpr):
    slot = (block % 2) * CHUNKS + c
    mbarrier.wait(shared.k_empty.index(slot), ((block // 2) & 1) ^ 1)
    copy_async(shared.k.index(slot), source + c * CHUNK, mask=used[:, None])
    arrive_when_copied(shared.k_full.index(slot), increment_count=False)


@gluon.jit
def _gather(walk, shared, query, local, pool):
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))
    block = 0
    count = 0
    blocks = walk.blocks_ahead(gl.program_id(0))
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, first_head = walk.natural(item)
        token = walk.token(at, first_head)
        blocks_next = walk.blocks_ahead(item + gl.num_programs(0))
        window_row = token.window_row()
        index = token.load_indices(0, key)
        used = token.used(index, 0, key)
        row = token.key_rows(index, 0, key, window_row, token.pool_start)
        index = token.load_indices(1, key)
        head = first_head + key
        queries = query.heads(token, head, column)
        source = _block_rows(local, pool, token, row, token.window_blocks > 0)
        for c in gl.static_range(CHUNKS):
            _copy_chunk(shared, source, used, block, c)
        mbarrier.wait(shared.q_empty.index(0), (count & 1) ^ 1)
        for c in gl.static_range(CHUNKS):
            copy_async(shared.q.index(c), queries + c * CHUNK, mask=(head < walk.heads)[:, None])
            arrive_when_copied(shared.q_full.index(c), increment_count=False)
        for j in range(1, blocks):
            used = token.used(index, j, key)
            row = token.key_rows(index, j, key, window_row, token.pool_start)
            index = token.load_indices(j + 1, key)
            source = _block_rows(local, pool, token, row, j < token.window_blocks)
            for c in gl.static_range(CHUNKS):
                _copy_chunk(shared, source, used, block + j, c)
        block += blocks
        count += 1  # noqa: SIM113
        blocks = blocks_next


@gluon.jit
def _issue_scores(shared, block, count, FIRST: gl.constexpr):
    slot = (block % 2) * CHUNKS
    phase = (block // 2) & 1
    s = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)
    for c in gl.static_range(CHUNKS):
        mbarrier.wait(shared.k_full.index(slot + c), phase)
        if FIRST:
            mbarrier.wait(shared.q_full.index(c), count & 1)
        fence_async_shared()
        k = shared.k.index(slot + c).permute((1, 0))
        s = warpgroup_mma(shared.q.index(c), k, s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _finish_scores(s, shared, last):
    """Wait for S and, in an item's last block, hand Q back."""
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(shared.q_empty.index(0), count=1, pred=last)
    return s


@gluon.jit
def _key_bias(token, index, j, key):
    """0 for used keys, -inf for unused ones, by columns of the scores."""
    bias = gl.where(token.used(index, j, key), 0.0, float("-inf"))
    return gl.convert_layout(bias, gl.SliceLayout(0, SCORES))


@gluon.jit
def _weights(s, bias, m, mass, scale_log2, block, shared):
    slot = block % 2
    p, alpha, m = weights(s, bias, m, scale_log2)
    mbarrier.wait(shared.p_empty.index(slot), ((block // 2) & 1) ^ 1)
    shared.p.index(slot).store(p.to(shared.p.dtype))
    shared.alpha.index(slot).store(alpha)
    fence_async_shared()
    mbarrier.arrive(shared.p_full.index(slot), count=1)
    return m, add_mass(mass, p, alpha)


@gluon.jit
def _scores(walk, shared, SINK, LSE, scale_log2):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    key = gl.arange(0, KEYS, layout=LINE)
    block = 0
    count = 0
    blocks = walk.blocks_ahead(gl.program_id(0))
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, first_head = walk.natural(item)
        token = walk.token(at, first_head)
        blocks_next = walk.blocks_ahead(item + gl.num_programs(0))
        head = first_head + offs_h
        live = head < walk.heads
        sink = load_sink(SINK, head, live)
        m = gl.full([HEADS], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
        mass = gl.zeros([HEADS, 8], gl.float32, layout=SUMS)

        s = _issue_scores(shared, block, count, True)
        bias = _key_bias(token, token.load_indices(0, key), 0, key)
        index = token.load_indices(1, key)
        s = _finish_scores(s, shared, blocks == 1)
        m, mass = _weights(s, bias, m, mass, scale_log2, block, shared)
        for j in range(1, blocks):
            s = _issue_scores(shared, block + j, count, False)
            bias = _key_bias(token, index, j, key)
            index = token.load_indices(j + 1, key)
            s = _finish_scores(s, shared, j == blocks - 1)
            m, mass = _weights(s, bias, m, mass, scale_log2, block + j, shared)

        empty = (token.window_rows == 0) & (token.pool_length == 0)
        m, total, share = with_sink(m, mass, sink, empty)
        slot = count % 2
        mbarrier.wait(shared.final_empty.index(slot), ((count // 2) & 1) ^ 1)
        shared.final.index(slot).store(share)
        mbarrier.arrive(shared.final_full.index(slot), count=1)
        lse = log_sum(m, total, sink, empty)
        gl.store(LSE + walk.statistic(token, head), lse, mask=live)
        block += blocks
        count += 1  # noqa: SIM113
        blocks = blocks_next


@gluon.jit
def _store_output(pointer, acc, share, live):
    o = gl.where(share[:, None] == 0.0, 0.0, acc * share[:, None])
    o = gl.convert_layout(o.to(pointer.dtype.element_ty), OUTPUT)
    gl.store(pointer, o, mask=live[:, None])


@gluon.jit
def _values(walk, shared, out, HALF: gl.constexpr):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUTPUT))
    block = 0
    count = 0
    blocks = walk.blocks_ahead(gl.program_id(0))
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        o0 = gl.zeros([HEADS, CHUNK], gl.float32, layout=VALUES)
        o1 = gl.zeros([HEADS, CHUNK], gl.float32, layout=VALUES)
        for j in range(blocks):
            slot = (block + j) % 2
            chunk = slot * CHUNKS + HALF
            mbarrier.wait(shared.p_full.index(slot), ((block + j) // 2) & 1)
            alpha = shared.alpha.index(slot).load(gl.SliceLayout(1, VALUES))
            o0 = rescaled(o0, alpha)
            o1 = rescaled(o1, alpha)
            # P and K are fenced already, by the scores warpgroup before it let P be seen.
            p = shared.p.index(slot)
            o0 = warpgroup_mma(p, shared.k.index(chunk), o0, is_async=True)
            o1 = warpgroup_mma(p, shared.k.index(chunk + 2), o1, is_async=True)
            o0, o1 = warpgroup_mma_wait(1, deps=[o0, o1])
            mbarrier.arrive(shared.k_empty.index(chunk), count=1)
            o1 = warpgroup_mma_wait(0, deps=[o1])
            mbarrier.arrive(shared.k_empty.index(chunk + 2), count=1)
            mbarrier.arrive(shared.p_empty.index(slot), count=1)
        # A use of blocks besides the loop's bound: Triton 3.6.0 drops a carried scalar without.
        block += blocks
        slot = count % 2
        mbarrier.wait(shared.final_full.index(slot), (count // 2) & 1)
        blocks = walk.blocks_ahead(item + gl.num_programs(0))
        share = shared.final.index(slot).load(gl.SliceLayout(1, VALUES))
        mbarrier.arrive(shared.final_empty.index(slot), count=1)
        at, first_head = walk.natural(item)
        head = first_head + offs_h
        pointer = out.heads(walk.place(at, first_head), head, column) + HALF * CHUNK
        _store_output(pointer, o0, share, head < walk.heads)
        _store_output(pointer + 2 * CHUNK, o1, share, head < walk.heads)
        count += 1  # noqa: SIM113


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
    VALUE_REGISTERS: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr,
):
    """Strides of query, KV and out are in units of 8 elements, of indices in elements."""
    shared = _allocate(Q.dtype.element_ty)
    walk = Walk(
        PLAN, INDICES, indices_b, indices_t, heads, tokens, slots, rows, items, None, DENSE
    )
    query = Rows(Q, query_b, query_h, query_t)
    local = Rows(LOCAL, local_b, local_h, local_t)
    pool = Rows(POOL, pool_b, pool_h, pool_t)
    out = Rows(OUT, out_b, out_h, out_t)
    gl.warp_specialize(
        [
            (_scores, (walk, shared, SINK, LSE, scale_log2)),
            (_values, (walk, shared, out, gl.constexpr(0))),
            (_values, (walk, shared, out, gl.constexpr(1))),
            (_gather, (walk, shared, query, local, pool)),
        ],
        [4, 4, 4],
        [VALUE_REGISTERS, VALUE_REGISTERS, GATHER_REGISTERS],
    )
