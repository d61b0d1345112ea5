# pyright: reportGeneralTypeIssues=false
"""The compressor's pooling, forward and backward: one entry is one tile.

A tile is ``SLOTS`` slots (a power of two at or past the entry's own) by COLUMNS channels, so that
the softmax over slots is a reduction inside the tile. With ``z = gate + bias``::

    w      = softmax(z) over the slots         entry = sum w * value
    dvalue = w * grad                          dgate = w * grad * (value - entry)

Slots are the block's RATIO tokens; OVERLAPPING, branch a of the block before (BEFORE) and then
branch b of the block itself (FIRST). A table entry below 0 is a block that does not exist.
"""

import triton
import triton.language as tl


@triton.jit
def entry_slots(
    FIRST,
    BEFORE,
    entry,
    RATIO: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    PACKED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Token (int64) of each slot, its branch (0 or 1), and whether it exists."""
    slot = tl.arange(0, SLOTS)
    if PACKED:
        first = tl.load(FIRST + entry)
        before = tl.load(BEFORE + entry)
    else:
        first = entry * RATIO
        before = first - RATIO
    branch = slot // RATIO
    if OVERLAPPING:
        block = tl.where(branch == 0, before, first)
        used = (slot < 2 * RATIO) & (block >= 0)
    else:
        block = first + tl.zeros_like(slot)
        used = (slot < RATIO) & (block >= 0)
    return (block + slot % RATIO).to(tl.int64), branch, used


@triton.jit
def bias_tile(
    BIAS,
    column,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """``[SLOTS, COLUMNS]`` of the bias ``[RATIO, C]``, fp32."""
    slot = tl.arange(0, SLOTS)
    channels: tl.constexpr = 2 * D if OVERLAPPING else D
    slots: tl.constexpr = 2 * RATIO if OVERLAPPING else RATIO
    place = (slot % RATIO) * channels + (slot // RATIO) * D
    mask = (slot < slots)[:, None] & (column < D)[None, :]
    return tl.load(BIAS + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def weights_of(gates, bias, mask):
    """Softmax over the slots that exist; 0 where none does."""
    z = tl.where(mask, gates.to(tl.float32) + bias, float("-inf"))
    top = tl.max(z, 0)
    # Rows of -inf alone: NaN where slots exist, as softmax has it, and 0 in spare rows.
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.where(mask, tl.exp(z - top[None, :]), 0.0)
    total = tl.sum(share, 0)
    total = tl.where(tl.max(mask.to(tl.int32), 0) == 0, 1.0, total)
    return share / total[None, :]


@triton.jit(do_not_specialize=["entries"])
def pool_forward_kernel(
    VALUES,
    GATES,
    BIAS,
    FIRST,
    BEFORE,
    ENTRIES,
    v_stride_b,
    v_stride_t,
    v_stride_c,
    g_stride_b,
    g_stride_t,
    g_stride_c,
    entries,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    PACKED: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS channels of one entry of ENTRIES ``[B, entries, D]``."""
    row = tl.program_id(0)
    batch = (row // entries).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token, branch, used = entry_slots(
        FIRST, BEFORE, row % entries, RATIO, OVERLAPPING, PACKED, SLOTS
    )
    mask = used[:, None] & (column < D)[None, :]
    channel = (branch * D)[:, None] + column[None, :]
    place = batch * v_stride_b + (token * v_stride_t)[:, None] + channel * v_stride_c
    values = tl.load(VALUES + place, mask=mask, other=0.0).to(tl.float32)
    place = batch * g_stride_b + (token * g_stride_t)[:, None] + channel * g_stride_c
    gates = tl.load(GATES + place, mask=mask, other=0.0)
    bias = bias_tile(BIAS, column, D, RATIO, OVERLAPPING, SLOTS)
    pooled = tl.sum(weights_of(gates, bias, mask) * values, 0)
    place = ENTRIES + row.to(tl.int64) * D + column
    tl.store(place, pooled.to(ENTRIES.dtype.element_ty), mask=column < D)


@triton.jit
def store_zeros(
    GRAD,
    base,
    stride_t,
    entry,
    tokens,
    column,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Zero what no entry pools after the last one: trailing tokens, branch a of its own block."""
    slot = tl.arange(0, SLOTS)
    slots: tl.constexpr = 2 * RATIO if OVERLAPPING else RATIO
    zeros = tl.zeros((SLOTS, column.shape[0]), GRAD.dtype.element_ty)
    inside = (column < D)[None, :]
    token = ((entry + 1) * RATIO + slot % RATIO).to(tl.int64)
    place = base + (token * stride_t + (slot // RATIO) * D)[:, None] + column[None, :]
    tl.store(GRAD + place, zeros, mask=((slot < slots) & (token < tokens))[:, None] & inside)
    if OVERLAPPING:
        token = (entry * RATIO + slot).to(tl.int64)
        place = base + (token * stride_t)[:, None] + column[None, :]
        tl.store(GRAD + place, zeros, mask=(slot < RATIO)[:, None] & inside)


@triton.jit(do_not_specialize=["tokens", "entries", "rows", "each"])
def pool_backward_kernel(
    VALUES,
    GATES,
    BIAS,
    FIRST,
    BEFORE,
    GRAD,
    GRAD_VALUES,
    GRAD_GATES,
    PARTIAL,
    v_stride_b,
    v_stride_t,
    v_stride_c,
    g_stride_b,
    g_stride_t,
    g_stride_c,
    d_stride_b,
    d_stride_s,
    d_stride_c,
    o_stride_b,
    o_stride_t,
    tokens,
    entries,
    rows,
    each,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    PACKED: tl.constexpr,
    NEED_VALUES: tl.constexpr,
    NEED_GATES: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS channels of ``each`` consecutive entries.

    A token's branch is pooled by one entry alone, so its gradients are plain stores (rows of
    stride ``o_stride_t``); unless PACKED, the last entry's program zeroes what none pools. The
    bias' gradient is summed over the program's entries into
    PARTIAL ``[programs, slots, D]``, fp32, which the launcher adds up.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = bias_tile(BIAS, column, D, RATIO, OVERLAPPING, SLOTS)
    total = tl.zeros((SLOTS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * each
    for row in tl.range(begin, tl.minimum(begin + each, rows)):
        batch = (row // entries).to(tl.int64)
        entry = row % entries
        token, branch, used = entry_slots(FIRST, BEFORE, entry, RATIO, OVERLAPPING, PACKED, SLOTS)
        mask = used[:, None] & (column < D)[None, :]
        channel = (branch * D)[:, None] + column[None, :]
        place = batch * g_stride_b + (token * g_stride_t)[:, None] + channel * g_stride_c
        weights = weights_of(tl.load(GATES + place, mask=mask, other=0.0), bias, mask)
        place = batch * d_stride_b + entry.to(tl.int64) * d_stride_s + column * d_stride_c
        grad = tl.load(GRAD + place, mask=column < D, other=0.0).to(tl.float32)
        of_values = weights * grad[None, :]
        out = batch * o_stride_b + (token * o_stride_t)[:, None] + channel
        if NEED_VALUES:
            tl.store(GRAD_VALUES + out, of_values.to(GRAD_VALUES.dtype.element_ty), mask=mask)
        if NEED_GATES or NEED_BIAS:
            place = batch * v_stride_b + (token * v_stride_t)[:, None] + channel * v_stride_c
            values = tl.load(VALUES + place, mask=mask, other=0.0).to(tl.float32)
            of_gates = of_values * (values - tl.sum(weights * values, 0)[None, :])
            if NEED_GATES:
                tl.store(GRAD_GATES + out, of_gates.to(GRAD_GATES.dtype.element_ty), mask=mask)
            if NEED_BIAS:
                total += tl.where(mask, of_gates, 0.0)
        if not PACKED:  # noqa: SIM102 - decided when compiled
            if entry == entries - 1:
                base = batch * o_stride_b
                if NEED_VALUES:
                    store_zeros(
                        GRAD_VALUES,
                        base,
                        o_stride_t,
                        entry,
                        tokens,
                        column,
                        D,
                        RATIO,
                        OVERLAPPING,
                        SLOTS,
                    )
                if NEED_GATES:
                    store_zeros(
                        GRAD_GATES,
                        base,
                        o_stride_t,
                        entry,
                        tokens,
                        column,
                        D,
                        RATIO,
                        OVERLAPPING,
                        SLOTS,
                    )
    if NEED_BIAS:
        slot = tl.arange(0, SLOTS)
        slots: tl.constexpr = 2 * RATIO if OVERLAPPING else RATIO
        place = tl.program_id(0).to(tl.int64) * slots * D + (slot * D)[:, None] + column[None, :]
        mask = (slot < slots)[:, None] & (column < D)[None, :]
        tl.store(PARTIAL + place, total, mask=mask)
