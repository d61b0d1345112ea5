# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""The scatter warpgroup of an ordered Hopper backward: dKV of one key block, stored in bf16.

For each 128-column chunk c of a block of 64 keys it computes, by wgmma,

    A [64 keys, 128 columns] = P^T dO[:, c] + dS^T Q[:, c]

and stores A's rows side by side, for ``ordered_sums_kernel`` to add. Columns are permuted within
each 16 as in ``hopper_backward_scatter``, so that a quad writes 32 bytes at once. Rows of unused
slots are stored too; nobody reads them. One accumulator is enough: stores, unlike reductions,
are done with at once.
"""

from .gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_backward_scatter import KEYS, QUADS, WIDTH, in_memory_order

CHUNK = gl.constexpr(128)
WIDE_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


def _store_asm() -> str:
    """Store 64 columns of one row in bf16.

    Operands: $1 base pointer, $2 element offset of the row and the columns, $3.. this lane's
    four elements of four values, in memory order.
    """
    lines = ["{ .reg .b64 row; .reg .b32 lower, upper;", "mad.wide.s32 row, $2, 2, $1;"]
    for i in range(4):
        a, b, c, d = (f"${3 + 4 * i + n}" for n in range(4))
        lines += [
            f"cvt.rn.bf16x2.f32 lower, {b}, {a}; cvt.rn.bf16x2.f32 upper, {d}, {c};",
            f"st.global.v2.b32 [row+{32 * i}], {{lower, upper}};",
        ]
    lines.append("mov.b32 $0, 0; }")
    return "\n".join(lines)


STORE = gl.constexpr(_store_asm())
STORE_CONSTRAINTS = gl.constexpr(",".join(["=r", "l", "r"] + ["f"] * 16))


@gluon.jit
def _store_rows(tile, base, offset):
    gl.inline_asm_elementwise(
        STORE,
        STORE_CONSTRAINTS,
        (base, offset) + in_memory_order(tile),  # noqa: RUF005
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store(walk, shared, ROWS_OUT, places, window_blocks):
    """The warpgroup's part; ROWS_OUT is bf16 ``[items, places, 512]``, 64 places a key block.

    The window's blocks come first, the slots' after ``window_blocks`` of them.
    """
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, QUADS))
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, QUADS))
    lane = (row * WIDTH)[:, None] + (quad * 4)[None, :]
    nothing = gl.zeros([KEYS, CHUNK], gl.float32, layout=WIDE_TILE)
    block = 0
    count = 0
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, _ = walk.spread(item)
        blocks = gl.load(walk.PLAN + at)
        own_blocks = (gl.load(walk.PLAN + walk.rows + at) + KEYS - 1) // KEYS
        mbarrier.wait(shared.q_full.index(0), count & 1, pred=blocks > 0)
        mbarrier.wait(shared.do_full.index(0), count & 1, pred=blocks > 0)
        fence_async_shared()
        for j in range(blocks):
            phase = block & 1
            place = gl.where(j < own_blocks, j, j - own_blocks + window_blocks)
            offset = (item * places + place * KEYS) * WIDTH + lane
            base = (ROWS_OUT + offset * 0).to(gl.int64, bitcast=True)
            mbarrier.wait(shared.p_full.index(0), phase)
            mbarrier.wait(shared.ds_full.index(0), phase)
            p = shared.p.index(0).permute((1, 0))
            ds = shared.ds.index(0).permute((1, 0))
            # A run-time zero: without it ptxas hoists every tile's descriptors and spills them.
            zero = block >> 28
            last = j == blocks - 1
            for c in gl.static_range(WIDTH // CHUNK):
                part = shared.do.index(zero).slice(c * CHUNK, CHUNK, dim=1)
                tile = warpgroup_mma(p, part, nothing, use_acc=False, is_async=True)
                part = shared.q.index(zero).slice(c * CHUNK, CHUNK, dim=1)
                tile = warpgroup_mma(ds, part, tile, is_async=True)
                tile = warpgroup_mma_wait(0, deps=[tile])
                # This also keeps ptxas from overlapping chunks, for which it would spill.
                mbarrier.arrive(shared.qdo_empty.index(c), count=1, pred=last)
                if c == WIDTH // CHUNK - 1:
                    mbarrier.arrive(shared.p_empty.index(0), count=1)
                left, right = gl.split(gl.permute(tile.reshape([KEYS, 2, CHUNK // 2]), (0, 2, 1)))
                _store_rows(left, base, offset + c * CHUNK)
                _store_rows(right, base, offset + (c * CHUNK + CHUNK // 2))
            block += 1
        count += (blocks > 0).to(gl.int32)
