"""Hopper backward, head_dim 512: dQ [64 heads x 512] per item, and dKV by vector atomics.

An item is (token t, 64 heads of it), taken round robin by 132 persistent programs. With Q and
dO [64, 512] in shared memory, for each of the token's key blocks of 64 rows K [64, 512]:

    P  = exp2(scale log2e Q K^T - lse)      dS = scale P (dO K^T - delta)
    dQ += dS K                              dKV rows += P^T dO + dS^T Q

Four warpgroups, synchronised by mbarriers alone:

    weights     S and P, and columns 0..255 of dQ
    gradients   dP and dS, and columns 256..511 of dQ
    scatter     dKV of the block in 64-column chunks, added to the fp32 buffer
                (``hopper_backward_scatter``)
    gather      cp.async of K rows, zero-filling unused slots, and of Q and dO

K lives in a ring of five 128-column chunks, freed as soon as their dQ piece is done, in the
order 0, 2, 1, 3 so that both dQ warpgroups free one in turn. P of an unused slot is not masked:
its K is 0, so it adds nothing to dQ, and its dKV is not scattered.

Tokens are visited so that programs that run together are far apart, and their windows don't
collide in the atomics.
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
from .hopper_backward_scatter import scatter
from .hopper_tiles import key_rows, load_indices, token_plan

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
CHUNK = gl.constexpr(128)
SLOTS = gl.constexpr(5)
COPY = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _ring(block, g: gl.constexpr):
    """Slot and phase of the ``g``-th chunk of a block."""
    unit = block * 4 + g
    return unit % SLOTS, (unit // SLOTS) & 1


@gluon.jit
def _gather(
    Q, DO, LOCAL, POOL, INDICES, PLAN,
    query_b, query_h, query_t, do_b, do_h, do_t, local_b, local_t, pool_b, pool_t,
    indices_b, indices_t, heads, tokens, slots, rows, items,
    q_s, do_s, k_s, q_full, do_full, qdo_empty, k_full, k_empty,
):
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, COPY, layout=gl.SliceLayout(0, ROWS))
    block = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, t, first_head, blocks, first, window_blocks, pool_start, pool_length = token_plan(
            PLAN, item, tokens, rows
        )
        b = b.to(gl.int64)
        local = LOCAL + b * local_b * 8
        pool = POOL + b * pool_b * 8
        index_row = INDICES + b * indices_b + t.to(gl.int64) * indices_t
        index = load_indices(index_row, 0, window_blocks, slots, key)
        for j in range(blocks):
            row, used = key_rows(index, j, window_blocks, first, t, pool_start, pool_length, key)
            index = load_indices(index_row, j + 1, window_blocks, slots, key)
            step = gl.where(j < window_blocks, local_t, pool_t)
            source = gl.where(j < window_blocks, local, pool)
            source = source + (row.to(gl.int64) * step * 8)[:, None] + column[None, :]
            for g in gl.static_range(4):
                slot, phase = _ring(block, g)
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                for c in gl.static_range(CHUNK // COPY):
                    copy_async(
                        k_s.index(slot).slice(c * COPY, COPY, dim=1),
                        source + ((g % 2 * 2 + g // 2) * CHUNK + c * COPY),
                        mask=used[:, None],
                    )
                arrive_when_copied(k_full.index(slot), increment_count=False)
            if j == 0:
                head = first_head + key
                live = (head < heads)[:, None]
                query = Q + b * query_b * 8 + t.to(gl.int64) * query_t * 8
                query = query + (head.to(gl.int64) * query_h * 8)[:, None] + column[None, :]
                mbarrier.wait(qdo_empty, (count & 1) ^ 1)
                for c in gl.static_range(512 // COPY):
                    copy_async(
                        q_s.index(0).slice(c * COPY, COPY, dim=1), query + c * COPY, mask=live
                    )
                arrive_when_copied(q_full, increment_count=False)
                upstream = DO + b * do_b * 8 + t.to(gl.int64) * do_t * 8
                upstream = upstream + (head.to(gl.int64) * do_h * 8)[:, None] + column[None, :]
                for c in gl.static_range(512 // COPY):
                    copy_async(
                        do_s.index(0).slice(c * COPY, COPY, dim=1), upstream + c * COPY, mask=live
                    )
                arrive_when_copied(do_full, increment_count=False)
            block += 1
        count += 1


@gluon.jit
def _products(x_s, k_s, k_full, block):
    """x K^T for x = Q or dO, [64 heads, 64 keys], as an unfinished wgmma."""
    s = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORES)
    for g in gl.static_range(4):
        slot, phase = _ring(block, g)
        mbarrier.wait(k_full.index(slot), phase)
        fence_async_shared()
        # A run-time zero: without it ptxas hoists every tile's descriptors and spills them.
        k = k_s.index(slot + (block >> 28)).permute((1, 0))
        x = x_s.slice((g % 2 * 2 + g // 2) * CHUNK, CHUNK, dim=1)
        s = warpgroup_mma(x, k, s, use_acc=g > 0, is_async=True)
    return s


@gluon.jit
def _add_query_gradient(dq0, dq1, ds_s, k_s, k_empty, block, FIRST: gl.constexpr):
    """Add dS K for this warpgroup's two chunks of K, freeing each when it is done."""
    slot0, _ = _ring(block, FIRST)
    slot1, _ = _ring(block, FIRST + 2)
    zero = block >> 28
    dq0 = warpgroup_mma(ds_s, k_s.index(slot0 + zero), dq0, is_async=True)
    dq1 = warpgroup_mma(ds_s, k_s.index(slot1 + zero), dq1, is_async=True)
    dq0 = warpgroup_mma_wait(1, deps=[dq0])
    mbarrier.arrive(k_empty.index(slot0), count=1)
    dq1 = warpgroup_mma_wait(0, deps=[dq1])
    mbarrier.arrive(k_empty.index(slot1), count=1)
    return dq0, dq1


@gluon.jit
def _store_query_gradient(DQ, dq, empty, b, t, first_head, heads, dq_b, dq_h, dq_t):
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERIES))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, QUERIES))
    place = DQ + b.to(gl.int64) * dq_b * 8 + t.to(gl.int64) * dq_t * 8
    place = place + (head.to(gl.int64) * dq_h * 8)[:, None] + column[None, :]
    # A row without keys may have NaN here, from NaN in its query or upstream gradient.
    dq = gl.where(empty, 0.0, dq).to(DQ.dtype.element_ty)
    gl.store(place, dq, mask=(head < heads)[:, None])


@gluon.jit
def _weights(
    PLAN, LSE, DQ, dq_b, dq_h, dq_t, heads, tokens, rows, items, scale_log2,
    q_s, k_s, p_s, ds_s, q_full, qdo_empty, k_full, k_empty, p_full, ds_full, pds_empty,
):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    block = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, t, first_head, blocks, first, window_blocks, pool_start, pool_length = token_plan(
            PLAN, item, tokens, rows
        )
        head = first_head + offs_h
        place = LSE + ((b * heads + head).to(gl.int64) * tokens + t)
        # Rows past the last head get P = 0.
        lse = gl.load(place, mask=head < heads, other=float("inf")) * LOG2E
        dq0 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        dq1 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        mbarrier.wait(q_full, count & 1)
        for j in range(blocks):
            phase = block & 1
            s = _products(q_s.index(block >> 28), k_s, k_full, block)
            s = warpgroup_mma_wait(0, deps=[s])
            # At most 0 for used slots but for rounding; unused ones may have any finite value.
            s = s * scale_log2 - lse[:, None]
            p = gl.exp2(gl.where(s > 0.0, 0.0, s))
            mbarrier.wait(pds_empty, phase ^ 1)
            p_s.index(0).store(p.to(p_s.dtype))
            fence_async_shared()
            mbarrier.arrive(p_full, count=1)
            mbarrier.wait(ds_full, phase)
            dq0, dq1 = _add_query_gradient(dq0, dq1, ds_s.index(0), k_s, k_empty, block, 0)
            block += 1
        mbarrier.arrive(qdo_empty, count=1)
        if DQ is not None:
            empty = (window_blocks == 0) & (pool_length == 0)
            _store_query_gradient(DQ, dq0, empty, b, t, first_head, heads, dq_b, dq_h, dq_t)
            _store_query_gradient(
                DQ + CHUNK, dq1, empty, b, t, first_head, heads, dq_b, dq_h, dq_t
            )
        count += 1


@gluon.jit
def _gradients(
    PLAN, DELTA, DQ, dq_b, dq_h, dq_t, heads, tokens, rows, items, scale,
    do_s, k_s, p_s, ds_s, do_full, qdo_empty, k_full, k_empty, p_full, ds_full,
):
    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    block = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, t, first_head, blocks, first, window_blocks, pool_start, pool_length = token_plan(
            PLAN, item, tokens, rows
        )
        head = first_head + offs_h
        place = DELTA + ((b * heads + head).to(gl.int64) * tokens + t)
        delta = gl.load(place, mask=head < heads, other=0.0)
        dq0 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        dq1 = gl.zeros([HEADS, CHUNK], gl.float32, layout=QUERIES)
        mbarrier.wait(do_full, count & 1)
        for j in range(blocks):
            phase = block & 1
            dp = _products(do_s.index(block >> 28), k_s, k_full, block)
            dp = warpgroup_mma_wait(0, deps=[dp])
            mbarrier.wait(p_full, phase)
            p = p_s.index(0).load(SCORES).to(gl.float32)
            ds_s.index(0).store((p * (dp - delta[:, None]) * scale).to(ds_s.dtype))
            fence_async_shared()
            mbarrier.arrive(ds_full, count=1)
            dq0, dq1 = _add_query_gradient(dq0, dq1, ds_s.index(0), k_s, k_empty, block, 1)
            block += 1
        mbarrier.arrive(qdo_empty, count=1)
        if DQ is not None:
            empty = (window_blocks == 0) & (pool_length == 0)
            _store_query_gradient(
                DQ + 2 * CHUNK, dq0, empty, b, t, first_head, heads, dq_b, dq_h, dq_t
            )
            _store_query_gradient(
                DQ + 3 * CHUNK, dq1, empty, b, t, first_head, heads, dq_b, dq_h, dq_t
            )
        count += 1


INTEGERS = (
    "query_b", "query_h", "query_t", "do_b", "do_h", "do_t", "local_b", "local_t",
    "pool_b", "pool_t", "indices_b", "indices_t", "dq_b", "dq_h", "dq_t",
    "heads", "tokens", "slots", "rows", "pool", "items",
)


@gluon.jit(do_not_specialize=INTEGERS)
def backward_kernel(
    Q, DO, LOCAL, POOL, INDICES, PLAN, LSE, DELTA, DQ, DKV,
    query_b, query_h, query_t, do_b, do_h, do_t, local_b, local_t, pool_b, pool_t,
    indices_b, indices_t, dq_b, dq_h, dq_t, heads, tokens, slots, rows, pool, items,
    scale, scale_log2,
    LOCAL_GRADIENT: gl.constexpr, POOL_GRADIENT: gl.constexpr,
    MATRIX_REGISTERS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):
    """Strides of query, dO, KV and dQ are in units of 8 elements, of indices in elements.

    DKV is fp32 ``[B * T + B * S, 512]``, local rows first, its columns permuted within each 16
    (``hopper_backward_scatter``).
    """
    dtype: gl.constexpr = Q.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [1, HEADS, 512], tile)
    do_s = gl.allocate_shared_memory(dtype, [1, HEADS, 512], tile)
    k_s = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, CHUNK], tile)
    p_s = gl.allocate_shared_memory(dtype, [1, HEADS, KEYS], tile)
    ds_s = gl.allocate_shared_memory(dtype, [1, HEADS, KEYS], tile)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    do_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    qdo_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    pds_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    # Copies arrive once a thread of the gather warpgroup, everything else once a warpgroup.
    mbarrier.init(q_full, count=128)
    mbarrier.init(do_full, count=128)
    mbarrier.init(qdo_empty, count=3)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(ds_full, count=1)
    mbarrier.init(pds_empty, count=1)
    gl.warp_specialize(
        [
            (scatter, (
                DKV, INDICES, PLAN, indices_b, indices_t, tokens, slots, rows, pool, items,
                q_s, do_s, p_s, ds_s,
                q_full, do_full, qdo_empty, p_full, ds_full, pds_empty,
                LOCAL_GRADIENT, POOL_GRADIENT,
            )),
            (_weights, (
                PLAN, LSE, DQ, dq_b, dq_h, dq_t, heads, tokens, rows, items, scale_log2,
                q_s, k_s, p_s, ds_s,
                q_full, qdo_empty, k_full, k_empty, p_full, ds_full, pds_empty,
            )),
            (_gradients, (
                PLAN, DELTA, DQ, dq_b, dq_h, dq_t, heads, tokens, rows, items, scale,
                do_s, k_s, p_s, ds_s, do_full, qdo_empty, k_full, k_empty, p_full, ds_full,
            )),
            (_gather, (
                Q, DO, LOCAL, POOL, INDICES, PLAN,
                query_b, query_h, query_t, do_b, do_h, do_t, local_b, local_t, pool_b, pool_t,
                indices_b, indices_t, heads, tokens, slots, rows, items,
                q_s, do_s, k_s, q_full, do_full, qdo_empty, k_full, k_empty,
            )),
        ],
        [4, 4, 4],
        [MATRIX_REGISTERS, MATRIX_REGISTERS, GATHER_REGISTERS],
    )
