"""Sum the partial rows that chose the same pool row, in a fixed order (no atomics).

One program owns one pool row, one KV head and COLUMNS columns:

    TOTAL[b, g, s, :] += sum over e in POINTERS[row] .. POINTERS[row + 1] of PARTIAL[ENTRY[e]]

ENTRY lists a chunk's (token, slot) pairs stably sorted by the pool row they chose (a CSR), so
each row's terms always come in token order, and chunks follow one another.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "pool_rows"])
def row_sum_kernel(
    PARTIAL,
    ENTRY,
    POINTERS,
    TOTAL,
    slots,
    pool_rows,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    pieces: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = program // pieces
    column = (program % pieces) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < D
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    batch = (row // pool_rows).to(tl.int64)
    begin = tl.load(POINTERS + row).to(tl.int32)
    end = tl.load(POINTERS + row + 1).to(tl.int32)
    total = tl.zeros([COLUMNS], tl.float32)
    for at in tl.range(begin, end, ENTRIES, num_stages=STAGES):
        place = at + tl.arange(0, ENTRIES)
        valid = place < end
        entry = tl.load(ENTRY + place, mask=valid, other=0).to(tl.int32)
        token = (entry // slots).to(tl.int64)
        source = ((token * kv_heads + kv_head) * slots + entry % slots) * D
        rows = tl.load(
            PARTIAL + source[:, None] + column[None, :],
            mask=valid[:, None] & in_row[None, :],
            other=0.0,
        )
        total += tl.sum(rows.to(tl.float32), 0)
    target = (batch * kv_heads + kv_head) * pool_rows + row % pool_rows
    place = TOTAL + target * D + column
    tl.store(place, tl.load(place, mask=in_row, other=0.0) + total, mask=in_row)
