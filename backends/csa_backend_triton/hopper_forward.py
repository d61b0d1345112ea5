"""Hopper forward, head_dim 512: one program computes [64 heads x 512] of the output per item.

An item is (token t, 64 heads of it); 132 persistent programs take items round robin. Over the
token's key blocks of 64 rows (its window first, then its selected slots), with Q [64, 512] and
one K = V block [64, 512] in shared memory:

    S = Q K^T        m' = max(m, rowmax S)      P = exp2(S - m')      a = exp2(m - m')
    l = a l + rowsum P                          O = a O + P K

and at the end out = O / (l + exp2(sink - m)), lse = m + log(l + exp2(sink - m)), S and m being in
log2 units. The running maximum is lazy: it moves only when a block exceeds it by 2^8, so that
most blocks leave O unscaled; P then reaches 2^8, which fp32 sums and bf16/fp16 P hold easily.

Four warpgroups, synchronised by mbarriers alone:

    scores    S by wgmma, P and a to shared memory, the row sums, lse
    values    twice: each owns two of O's four 128-column chunks, O by wgmma
    gather    cp.async of K rows, zero-filling unused slots, and of the next item's Q

K lives in a ring of two blocks of four 128-column chunks. A chunk is handed over when its copies
land and comes back as soon as its part of P K is done, which shortens the serial chain
gather -> S -> P -> O that limits this kernel.
"""

from __future__ import annotations

from .gluon_compat import (
    arrive_when_copied,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_tiles import item_plan, key_rows, load_blocks, load_indices

CHUNKS = gl.constexpr(4)
CHUNK = gl.constexpr(128)
HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
LAZY_LOG2 = gl.constexpr(8.0)
LOWEST = gl.constexpr(-3.4e38)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
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
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def _rescale_asm(elements: int) -> tuple[str, str]:
    """acc *= alpha for one thread's ``elements`` accumulators, skipped where nothing changes.

    An accumulator's elements alternate in pairs between two rows, so elements 0 and 2 of alpha
    are all there is. A warp skips the multiplications when alpha is 1 in all of its rows, which
    the lazy maximum makes the usual case; Gluon has no warp-wide branch of its own.
    """
    first, second = 2 * elements, 2 * elements + 2
    lines = [
        "{ .reg .pred moved;",
        f"setp.neu.f32 moved, ${first}, 0f3F800000;",
        f"setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;",
        "vote.sync.any.pred moved, moved, 0xffffffff;",
        "@!moved bra.uni same;",
        *(f"mul.f32 ${i}, ${i}, ${2 * elements + i};" for i in range(elements)),
        "same: }",
    ]
    constraints = ["=f"] * elements + [str(i) for i in range(elements)] + ["f"] * elements
    return " ".join(lines), ",".join(constraints)


RESCALE, RESCALE_CONSTRAINTS = (gl.constexpr(x) for x in _rescale_asm(64))


@gluon.jit
def _copy_block(
    local, local_t, pool, pool_t, row, used, in_window, block, k_s, k_full, k_empty
):
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))
    step = gl.where(in_window, local_t, pool_t)
    source = gl.where(in_window, local, pool)
    source = source + (row.to(gl.int64) * step * 8)[:, None] + column[None, :]
    slot = (block % 2) * CHUNKS
    for c in gl.static_range(CHUNKS):
        mbarrier.wait(k_empty.index(slot + c), ((block // 2) & 1) ^ 1)
        copy_async(k_s.index(slot + c), source + c * CHUNK, mask=used[:, None])
        arrive_when_copied(k_full.index(slot + c), increment_count=False)


@gluon.jit
def _gather(
    Q, LOCAL, POOL, INDICES, PLAN,
    query_b, query_h, query_t, local_b, local_t, pool_b, pool_t, indices_b, indices_t,
    heads, tokens, slots, rows, items,
    q_s, k_s, q_full, q_empty, k_full, k_empty,
):
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))
    head_blocks = (heads + HEADS - 1) // HEADS
    block = 0
    count = 0
    blocks = load_blocks(PLAN, gl.program_id(0), items, head_blocks)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, t, first_head, first, window_blocks, pool_start, pool_length = item_plan(
            PLAN, item, head_blocks, tokens, rows
        )
        blocks_next = load_blocks(PLAN, item + gl.num_programs(0), items, head_blocks)
        local = LOCAL + b.to(gl.int64) * local_b * 8
        pool = POOL + b.to(gl.int64) * pool_b * 8
        index_row = INDICES + b.to(gl.int64) * indices_b + t.to(gl.int64) * indices_t
        head = first_head + key
        index = load_indices(index_row, 0, window_blocks, slots, key)
        row, used = key_rows(index, 0, window_blocks, first, t, pool_start, pool_length, key)
        index = load_indices(index_row, 1, window_blocks, slots, key)
        _copy_block(
            local, local_t, pool, pool_t, row, used, window_blocks > 0, block, k_s, k_full, k_empty
        )
        query = Q + b.to(gl.int64) * query_b * 8 + t.to(gl.int64) * query_t * 8
        head = first_head + key
        query = query + (head.to(gl.int64) * query_h * 8)[:, None] + column[None, :]
        mbarrier.wait(q_empty, (count & 1) ^ 1)
        for c in gl.static_range(CHUNKS):
            copy_async(q_s.index(c), query + c * CHUNK, mask=(head < heads)[:, None])
            arrive_when_copied(q_full.index(c), increment_count=False)
        for j in range(1, blocks):
            row, used = key_rows(index, j, window_blocks, first, t, pool_start, pool_length, key)
            index = load_indices(index_row, j + 1, window_blocks, slots, key)
            _copy_block(
                local, local_t, pool, pool_t, row, used, j < window_blocks, block + j,
                k_s, k_full, k_empty,
            )
        block += blocks
        count += 1
        blocks = blocks_next


@gluon.jit
def _issue_scores(q_s, k_s, k_full, q_full, block, count, FIRST: gl.constexpr, GROUP: gl.constexpr):
    slot = (block % 2) * CHUNKS
    phase = (block // 2) & 1
    s = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)
    for c in gl.static_range(CHUNKS):
        if c % GROUP == 0:
            for g in gl.static_range(GROUP):
                mbarrier.wait(k_full.index(slot + c + g), phase)
                if FIRST:
                    mbarrier.wait(q_full.index(c + g), count & 1)
            fence_async_shared()
        k = k_s.index(slot + c).permute((1, 0))
        s = warpgroup_mma(q_s.index(c), k, s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _key_bias(index, j, window_blocks, first, t, pool_start, pool_length, key):
    _, used = key_rows(index, j, window_blocks, first, t, pool_start, pool_length, key)
    return gl.convert_layout(gl.where(used, 0.0, float("-inf")), gl.SliceLayout(0, SCORES))


@gluon.jit
def _weights(s, bias, m, l, scale_log2, block, p_s, alpha_s, p_full, p_empty):
    slot = block % 2
    s = s * scale_log2 + bias[None, :]
    top = gl.max(gl.max(s.reshape([HEADS, KEYS // 8, 8]), 1), 1)
    top = gl.convert_layout(top, gl.SliceLayout(1, SCORES))
    m_new = gl.where(top > m + LAZY_LOG2, top, m)
    p = gl.exp2(s - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    mbarrier.wait(p_empty.index(slot), ((block // 2) & 1) ^ 1)
    p_s.index(slot).store(p.to(p_s.dtype))
    alpha_s.index(slot).store(alpha)
    fence_async_shared()
    mbarrier.arrive(p_full.index(slot), count=1)
    # Kept as 8 partial sums a row, so that no lane waits for another until the item's end.
    sums = gl.convert_layout(gl.sum(p.reshape([HEADS, KEYS // 8, 8]), 1), SUMS)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None] + sums
    return m_new, l


@gluon.jit
def _scores(
    INDICES, SINK, PLAN, LSE, indices_b, indices_t,
    heads, tokens, slots, rows, items, scale_log2,
    q_s, k_s, p_s, alpha_s, final_s,
    q_full, q_empty, k_full, p_full, p_empty, final_full, final_empty,
    EARLY: gl.constexpr, GROUP: gl.constexpr,
):
    head_blocks = (heads + HEADS - 1) // HEADS
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    key = gl.arange(0, KEYS, layout=LINE)
    block = 0
    count = 0
    blocks = load_blocks(PLAN, gl.program_id(0), items, head_blocks)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, t, first_head, first, window_blocks, pool_start, pool_length = item_plan(
            PLAN, item, head_blocks, tokens, rows
        )
        blocks_next = load_blocks(PLAN, item + gl.num_programs(0), items, head_blocks)
        index_row = INDICES + b.to(gl.int64) * indices_b + t.to(gl.int64) * indices_t
        head = first_head + offs_h
        if SINK is None:
            sink = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        else:
            sink = gl.load(SINK + head, mask=head < heads, other=0.0).to(gl.float32)
        m = gl.full([HEADS], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
        l = gl.zeros([HEADS, 8], gl.float32, layout=SUMS)

        s = _issue_scores(q_s, k_s, k_full, q_full, block, count, True, GROUP)
        index = load_indices(index_row, 0, window_blocks, slots, key)
        bias = _key_bias(index, 0, window_blocks, first, t, pool_start, pool_length, key)
        index = load_indices(index_row, 1, window_blocks, slots, key)
        s = warpgroup_mma_wait(0, deps=[s])
        if EARLY:
            mbarrier.arrive(q_empty, count=1, pred=blocks == 1)
        m, l = _weights(s, bias, m, l, scale_log2, block, p_s, alpha_s, p_full, p_empty)
        for j in range(1, blocks):
            s = _issue_scores(q_s, k_s, k_full, q_full, block + j, count, False, GROUP)
            bias = _key_bias(index, j, window_blocks, first, t, pool_start, pool_length, key)
            index = load_indices(index_row, j + 1, window_blocks, slots, key)
            s = warpgroup_mma_wait(0, deps=[s])
            if EARLY:
                mbarrier.arrive(q_empty, count=1, pred=j == blocks - 1)
            m, l = _weights(s, bias, m, l, scale_log2, block + j, p_s, alpha_s, p_full, p_empty)
        if not EARLY:
            mbarrier.arrive(q_empty, count=1)

        empty = (window_blocks == 0) & (pool_length == 0)
        total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, SCORES))
        total = gl.where(empty, 0.0, total)
        m = gl.where(empty, LOWEST, m)
        m_end = gl.maximum(m, sink * LOG2E)
        sink_dominates = m_end > m
        share = gl.exp2(m - m_end)
        sink_mass = gl.where(sink_dominates, 1.0, gl.exp2(sink * LOG2E - m))
        total = total * share + sink_mass
        slot = count % 2
        mbarrier.wait(final_empty.index(slot), ((count // 2) & 1) ^ 1)
        # Exactly 0 marks a row without keys; its O may be NaN from a NaN query and is not used.
        final_s.index(slot).store(gl.where(empty, 0.0, share / total))
        mbarrier.arrive(final_full.index(slot), count=1)
        # In natural units from the start, so that a dominating sink comes back unrounded.
        lse = gl.where(sink_dominates, sink, m * LN2) + gl.log2(total) * LN2
        lse = gl.where(empty, sink, lse)
        gl.store(LSE + ((b * heads + head).to(gl.int64) * tokens + t), lse, mask=head < heads)
        block += blocks
        count += 1
        blocks = blocks_next


@gluon.jit
def _rescaled(acc, alpha):
    return gl.inline_asm_elementwise(
        RESCALE, RESCALE_CONSTRAINTS, [acc, gl.expand_dims(alpha, 1)],
        dtype=gl.float32, is_pure=False, pack=64,
    )


@gluon.jit
def _store_output(OUT, acc, share, head, heads, out_h):
    o = gl.where(share[:, None] == 0.0, 0.0, acc * share[:, None])
    o = gl.convert_layout(o.to(OUT.dtype.element_ty), OUTPUT)
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUTPUT))
    pointer = OUT + (head.to(gl.int64) * out_h * 8)[:, None] + column[None, :]
    gl.store(pointer, o, mask=(head < heads)[:, None])


@gluon.jit
def _values(
    PLAN, OUT, out_b, out_h, out_t, heads, tokens, items,
    k_s, p_s, alpha_s, final_s, k_empty, p_full, p_empty, final_full, final_empty,
    HALF: gl.constexpr,
):
    head_blocks = (heads + HEADS - 1) // HEADS
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUTPUT))
    block = 0
    count = 0
    blocks = load_blocks(PLAN, gl.program_id(0), items, head_blocks)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        o0 = gl.zeros([HEADS, CHUNK], gl.float32, layout=VALUES)
        o1 = gl.zeros([HEADS, CHUNK], gl.float32, layout=VALUES)
        for j in range(blocks):
            slot = (block + j) % 2
            chunk = slot * CHUNKS + HALF
            mbarrier.wait(p_full.index(slot), ((block + j) // 2) & 1)
            alpha = alpha_s.index(slot).load(gl.SliceLayout(1, VALUES))
            o0 = _rescaled(o0, alpha)
            o1 = _rescaled(o1, alpha)
            # P and K are fenced already, by the scores warpgroup before it let P be seen.
            o0 = warpgroup_mma(p_s.index(slot), k_s.index(chunk), o0, is_async=True)
            o1 = warpgroup_mma(p_s.index(slot), k_s.index(chunk + 2), o1, is_async=True)
            o0, o1 = warpgroup_mma_wait(1, deps=[o0, o1])
            mbarrier.arrive(k_empty.index(chunk), count=1)
            o1 = warpgroup_mma_wait(0, deps=[o1])
            mbarrier.arrive(k_empty.index(chunk + 2), count=1)
            mbarrier.arrive(p_empty.index(slot), count=1)
        # A use of blocks besides the loop's bound: Triton 3.6.0 drops a carried scalar without one.
        block += blocks
        slot = count % 2
        mbarrier.wait(final_full.index(slot), (count // 2) & 1)
        blocks = load_blocks(PLAN, item + gl.num_programs(0), items, head_blocks)
        share = final_s.index(slot).load(gl.SliceLayout(1, VALUES))
        mbarrier.arrive(final_empty.index(slot), count=1)
        row = item // head_blocks
        head = (item % head_blocks) * HEADS + offs_h
        out = OUT + (row // tokens).to(gl.int64) * out_b * 8 + HALF * CHUNK
        out = out + (row % tokens).to(gl.int64) * out_t * 8
        _store_output(out, o0, share, head, heads, out_h)
        _store_output(out + 2 * CHUNK, o1, share, head, heads, out_h)
        count += 1


INTEGERS = (
    "query_b", "query_h", "query_t", "local_b", "local_t", "pool_b", "pool_t",
    "indices_b", "indices_t", "out_b", "out_h", "out_t",
    "heads", "tokens", "slots", "rows", "items",
)


@gluon.jit(do_not_specialize=INTEGERS)
def forward_kernel(
    Q, LOCAL, POOL, INDICES, SINK, PLAN, OUT, LSE,
    query_b, query_h, query_t, local_b, local_t, pool_b, pool_t, indices_b, indices_t,
    out_b, out_h, out_t, heads, tokens, slots, rows, items, scale_log2,
    EARLY: gl.constexpr, GROUP: gl.constexpr, VALUE_REGISTERS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):
    """Strides of query, KV and out are in units of 8 elements (16 bytes), of indices in elements."""
    dtype: gl.constexpr = Q.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [CHUNKS, HEADS, CHUNK], tile)
    k_s = gl.allocate_shared_memory(dtype, [2 * CHUNKS, KEYS, CHUNK], tile)
    p_s = gl.allocate_shared_memory(dtype, [2, HEADS, KEYS], tile)
    alpha_s = gl.allocate_shared_memory(gl.float32, [2, HEADS], line)
    final_s = gl.allocate_shared_memory(gl.float32, [2, HEADS], line)
    q_full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [2 * CHUNKS, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [2 * CHUNKS, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    final_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    final_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    # Copies arrive once a thread of the gather warpgroup, everything else once a warpgroup.
    for c in gl.static_range(CHUNKS):
        mbarrier.init(q_full.index(c), count=128)
    mbarrier.init(q_empty, count=1)
    for c in gl.static_range(2 * CHUNKS):
        mbarrier.init(k_full.index(c), count=128)
        mbarrier.init(k_empty.index(c), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
        mbarrier.init(final_full.index(i), count=1)
        mbarrier.init(final_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_scores, (
                INDICES, SINK, PLAN, LSE, indices_b, indices_t,
                heads, tokens, slots, rows, items, scale_log2,
                q_s, k_s, p_s, alpha_s, final_s,
                q_full, q_empty, k_full, p_full, p_empty, final_full, final_empty,
                EARLY, GROUP,
            )),
            (_values, (
                PLAN, OUT, out_b, out_h, out_t, heads, tokens, items,
                k_s, p_s, alpha_s, final_s, k_empty, p_full, p_empty, final_full, final_empty,
                gl.constexpr(0),
            )),
            (_values, (
                PLAN, OUT, out_b, out_h, out_t, heads, tokens, items,
                k_s, p_s, alpha_s, final_s, k_empty, p_full, p_empty, final_full, final_empty,
                gl.constexpr(1),
            )),
            (_gather, (
                Q, LOCAL, POOL, INDICES, PLAN,
                query_b, query_h, query_t, local_b, local_t, pool_b, pool_t, indices_b, indices_t,
                heads, tokens, slots, rows, items,
                q_s, k_s, q_full, q_empty, k_full, k_empty,
            )),
        ],
        [4, 4, 4],
        [VALUE_REGISTERS, VALUE_REGISTERS, GATHER_REGISTERS],
    )
