# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The scatter warpgroup of the Hopper backward: dKV of one key block, added to fp32 rows.

For each 64-column piece c of a block of 64 keys it computes, by wgmma,

    A [64 keys, 64 columns] = P^T dO[:, c] + dS^T Q[:, c]

and adds A's rows to the buffer's rows of their keys with 16-byte vector reductions, one piece's
reductions running under the next piece's wgmma. Rows of unused slots are predicated off.

The accumulator holds, per row, columns 8 i + 2 q + e (i = 0..7, e = 0, 1) in lane q of a quad.
Each lane's four values of i = 2 g, 2 g + 1 form one 16-byte element, stored at floats
16 g + 4 q, so the buffer's columns are permuted within each 16:

    stored[16 g + 4 q + 2 h + e] = A[16 g + 8 h + 2 q + e]

``hopper_cast`` undoes it. To add whole 128-byte lines, lanes l and l ^ 4,
which hold neighbouring rows, first swap half of what they have: then eight lanes cover 32
floats of the even row in one instruction, and of the odd row in the next.
"""

from .gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)
PIECE = gl.constexpr(64)
PIECES = gl.constexpr(8)
WIDTH = gl.constexpr(512)

TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# Two neighbouring keys a thread.
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
# Rows, and lanes of a quad, as TILE holds them.
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)

KEPT = 0.25
"""Share of the sums that L2 evicts last.

Measured on an H200 with sums of 32 and 64 MiB, T=65536 and 131072: 0.93 and 0.97 of the time. All
of them: 0.97 and 0.99.
"""


def _reduction_asm() -> str:
    """Add one row's 64 columns of an even and an odd row.

    Operands: $1 base pointer of the piece, $2 and $3 float offsets of the even and the odd row
    (negative: unused), $4 whether this lane's own row is the odd one, $5.. this lane's four
    elements of four floats, in memory order.
    """
    lines = [
        "{ .reg .pred odd, even_used, odd_used; .reg .b64 even_row, odd_row, kept;",
        f"createpolicy.fractional.L2::evict_last.b64 kept, {KEPT};",
        ".reg .b32 give, take<4>, keep<4>, e<4>, o<4>;",
        "setp.ne.s32 odd, $4, 0;",
        "setp.ge.s32 even_used, $2, 0; setp.ge.s32 odd_used, $3, 0;",
        "mad.wide.s32 even_row, $2, 4, $1; mad.wide.s32 odd_row, $3, 4, $1;",
    ]
    for pair in range(2):
        for i in range(4):
            lower, upper = 5 + 8 * pair + i, 9 + 8 * pair + i
            lines += [
                f"selp.b32 give, ${lower}, ${upper}, odd;",
                f"shfl.sync.bfly.b32 take{i}, give, 4, 31, -1;",
                f"selp.b32 keep{i}, ${upper}, ${lower}, odd;",
                f"selp.b32 e{i}, take{i}, keep{i}, odd; selp.b32 o{i}, keep{i}, take{i}, odd;",
            ]
        for name in ("even", "odd"):
            values = ", ".join(f"{name[0]}{i}" for i in range(4))
            lines.append(
                f"@{name}_used red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 "
                f"[{name}_row+{128 * pair}], {{{values}}}, kept;"
            )
    lines.append("mov.b32 $0, 0; }")
    return "\n".join(lines)


REDUCTION = gl.constexpr(_reduction_asm())
REDUCTION_CONSTRAINTS = gl.constexpr(",".join(["=r", "l", "r", "r", "r"] + ["f"] * 16))


@gluon.jit
def _elements(y):
    """[64 rows, 4 g, 4 q] -> one [64, 4 q] tensor for each g."""
    even, odd = gl.split(gl.permute(y, (0, 2, 1)).reshape([64, 4, 2, 2]))
    g0, g2 = gl.split(even)
    g1, g3 = gl.split(odd)
    return (
        gl.convert_layout(g0, QUADS),
        gl.convert_layout(g1, QUADS),
        gl.convert_layout(g2, QUADS),
        gl.convert_layout(g3, QUADS),
    )


@gluon.jit
def in_memory_order(tile):
    """A tile's elements of 16 floats a row and lane, by place in memory."""
    # Columns 16 g + 8 h + 2 q + e: xe by e, then by h. All conversions are relabellings.
    x0, x1 = gl.split(tile.reshape([64, 4, 2, 4, 2]))
    x00, x10 = gl.split(gl.permute(x0, (0, 1, 3, 2)))
    x01, x11 = gl.split(gl.permute(x1, (0, 1, 3, 2)))
    a0, a1, a2, a3 = _elements(x00)
    b0, b1, b2, b3 = _elements(x01)
    c0, c1, c2, c3 = _elements(x10)
    d0, d1, d2, d3 = _elements(x11)
    return a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3


@gluon.jit
def add_rows(tile, base, even_offset, odd_offset, odd):
    gl.inline_asm_elementwise(
        REDUCTION,
        REDUCTION_CONSTRAINTS,
        # Triton has no starred tuples.
        (base, even_offset, odd_offset, odd) + in_memory_order(tile),  # noqa: RUF005
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _row_offsets(
    token,
    index,
    j,
    window_row,
    pool_row,
    LOCAL_GRADIENT: gl.constexpr,
    POOL_GRADIENT: gl.constexpr,
):
    """Float offsets of the buffer rows of each row's even and odd key; negative if unwanted."""
    key = gl.arange(0, KEYS, layout=PAIRS)
    used = token.used(index, j, key)
    if not LOCAL_GRADIENT:
        used = used & (j >= token.window_blocks)
    if not POOL_GRADIENT:
        used = used & (j < token.window_blocks)
    row = token.key_rows(index, j, key, window_row, pool_row)
    even, odd = gl.split(gl.where(used, row * WIDTH, -WIDTH).reshape([KEYS // 2, 2]))
    even = gl.join(even, even).reshape([KEYS])
    odd = gl.join(odd, odd).reshape([KEYS])
    return (
        gl.convert_layout(even, gl.SliceLayout(1, QUADS)),
        gl.convert_layout(odd, gl.SliceLayout(1, QUADS)),
    )


@gluon.jit
def _piece_products(shared, p, ds, zero, nothing, C: gl.constexpr):
    """The C-th piece's A, as an unfinished wgmma."""
    part = shared.do.index(zero).slice(C * PIECE, PIECE, dim=1)
    tile = warpgroup_mma(p, part, nothing, use_acc=False, is_async=True)
    part = shared.q.index(zero).slice(C * PIECE, PIECE, dim=1)
    return warpgroup_mma(ds, part, tile, is_async=True)


@gluon.jit
def scatter(
    walk,
    shared,
    DKV,
    pool_rows,
    LOCAL_GRADIENT: gl.constexpr,
    POOL_GRADIENT: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The scatter warpgroup; ``pool_rows`` is S. Q and dO are given back whole or in 4 PARTS."""
    key = gl.arange(0, KEYS, layout=PAIRS)
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, QUADS))
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, QUADS))
    lane = ((row & 1) * 16)[:, None] + (quad * 4)[None, :]
    odd = (row & 1)[:, None] + (quad * 0)[None, :]
    nothing = gl.zeros([KEYS, PIECE], gl.float32, layout=TILE)
    block = 0
    count = 0
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, first_head = walk.spread(item)
        blocks = gl.load(walk.PLAN + at)
        token = walk.token(at, first_head)
        window_row = at + 1 - token.window_rows
        pool_row = walk.rows + token.b * pool_rows + token.pool_start
        index = token.load_indices(0, key)
        mbarrier.wait(shared.q_full.index(0), count & 1, pred=blocks > 0)
        mbarrier.wait(shared.do_full.index(0), count & 1, pred=blocks > 0)
        fence_async_shared()
        for j in range(blocks):
            phase = block & 1
            even_offset, odd_offset = _row_offsets(
                token, index, j, window_row, pool_row, LOCAL_GRADIENT, POOL_GRADIENT
            )
            even_offset = even_offset[:, None] + lane
            odd_offset = odd_offset[:, None] + lane
            index = token.load_indices(j + 1, key)
            base = (DKV + even_offset * 0).to(gl.int64, bitcast=True)
            mbarrier.wait(shared.p_full.index(0), phase)
            mbarrier.wait(shared.ds_full.index(0), phase)
            p = shared.p.index(0).permute((1, 0))
            ds = shared.ds.index(0).permute((1, 0))
            # A run-time zero: without it ptxas hoists every tile's descriptors and spills them.
            zero = block >> 28
            previous = _piece_products(shared, p, ds, zero, nothing, 0)
            for c in gl.static_range(1, PIECES):
                tile = _piece_products(shared, p, ds, zero, nothing, c)
                done = warpgroup_mma_wait(2, deps=[previous])
                if PARTS == 4 and c % 2 == 0:
                    last = j == blocks - 1
                    mbarrier.arrive(shared.qdo_empty.index(c // 2 - 1), count=1, pred=last)
                place = base + (c - 1) * PIECE * 4
                add_rows(done, place, even_offset, odd_offset, odd)
                previous = tile
            done = warpgroup_mma_wait(0, deps=[previous])
            mbarrier.arrive(shared.p_empty.index(0), count=1)
            mbarrier.arrive(shared.qdo_empty.index(PARTS - 1), count=1, pred=j == blocks - 1)
            add_rows(done, base + (WIDTH - PIECE) * 4, even_offset, odd_offset, odd)
            block += 1
        count += (blocks > 0).to(gl.int32)
