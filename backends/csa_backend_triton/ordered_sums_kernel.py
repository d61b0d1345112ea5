# pyright: reportGeneralTypeIssues=false
"""Sums of the rows that an ordered Hopper backward stored, each in a fixed order.

The backward stored bf16 PARTIAL ``[tokens of a chunk, head blocks, places, D]``, its columns
permuted within each 16 (``hopper_backward_scatter``). One program owns one row of KV:

    pool_sums_kernel     TOTAL[row] += sum of the places of the slots that chose the row, which
                         ENTRY lists in order, POINTERS[row] .. POINTERS[row + 1] (a CSR)
    window_sums_kernel   row r's sum over the tokens r .. r + W - 1 of its document, of which a
                         chunk may hold some: what is not complete is carried to the next chunk

Eight rows are added at a time into as many accumulators, which are added up at the end.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "places", "first_place"])
def pool_sums_kernel(
    PARTIAL,
    ENTRY,
    POINTERS,
    TOTAL,
    slots,
    places,
    first_place,
    HEAD_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, D)
    begin = tl.load(POINTERS + row).to(tl.int32) * HEAD_BLOCKS
    end = tl.load(POINTERS + row + 1).to(tl.int32) * HEAD_BLOCKS
    acc = tl.zeros([TOGETHER, D], tl.float32)
    for at in tl.range(begin, end, TOGETHER, num_stages=STAGES):
        part = at + tl.arange(0, TOGETHER)
        valid = part < end
        entry = tl.load(ENTRY + part // HEAD_BLOCKS, mask=valid, other=0)
        item = entry // slots * HEAD_BLOCKS + part % HEAD_BLOCKS
        source = (item * places + first_place + entry % slots).to(tl.int64) * D
        rows = tl.load(PARTIAL + source[:, None] + column[None, :], mask=valid[:, None], other=0.0)
        acc += rows.to(tl.float32)
    place = TOTAL + row.to(tl.int64) * D + column
    tl.store(place, tl.load(place) + tl.sum(acc, 0))


@triton.jit(do_not_specialize=["rows", "tokens", "window", "places", "first", "end", "lowest"])
def window_sums_kernel(
    PARTIAL,
    PLAN,
    CARRY_IN,
    CARRY_OUT,
    GRAD,
    grad_b,
    grad_t,
    rows,
    tokens,
    window,
    places,
    first,
    end,
    lowest,
    HEAD_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows ``lowest`` and up, for the chunk of flat tokens ``first .. end - 1``.

    A carried row r lies at ``r % W``. PLAN is ``hopper_plan``'s.
    """
    row = lowest + tl.program_id(0)
    batch = row // tokens
    readers_end = tl.minimum(row + window, (batch + 1) * tokens)
    if readers_end <= first:
        return
    column = tl.arange(0, D)
    begin = tl.maximum(row, first) - first
    stop = tl.minimum(readers_end, end) - first
    acc = tl.zeros([TOGETHER, D], tl.float32)
    for at in tl.range(begin * HEAD_BLOCKS, stop * HEAD_BLOCKS, TOGETHER, num_stages=STAGES):
        item = at + tl.arange(0, TOGETHER)
        inside = item < stop * HEAD_BLOCKS
        token = first + item // HEAD_BLOCKS
        window_rows = tl.load(PLAN + rows + token, mask=inside, other=0)
        place = row - (token + 1 - window_rows)
        valid = inside & (place >= 0)
        source = (item * places + place).to(tl.int64) * D
        values = tl.load(
            PARTIAL + source[:, None] + column[None, :], mask=valid[:, None], other=0.0
        )
        acc += values.to(tl.float32)
    total = tl.sum(acc, 0)
    carried = (row % window) * D + column
    if row < first:
        total += tl.load(CARRY_IN + carried)
    if readers_end <= end:
        natural = column // 16 * 16 + column % 4 // 2 * 8 + column % 16 // 4 * 2 + column % 2
        place = GRAD + batch.to(tl.int64) * grad_b + (row % tokens).to(tl.int64) * grad_t
        tl.store(place + natural, total.to(GRAD.dtype.element_ty))
    else:
        tl.store(CARRY_OUT + carried, total)
