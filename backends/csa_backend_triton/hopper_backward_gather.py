# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The gather warpgroup of the Hopper backward: K rows, Q and dO from global to shared memory.

It copies by cp.async: of each key block four chunks of 128 columns, zero-filling unused slots,
each into the next slot of a ring of five once that has come back; and after an item's first
block its Q and dO.
"""

from .gluon_compat import arrive_when_copied, copy_async, gl, gluon, mbarrier

KEYS = gl.constexpr(64)
CHUNK = gl.constexpr(128)
SLOTS = gl.constexpr(5)
CHUNK_ORDER = gl.constexpr((0, 2, 1, 3))

# Four rows a thread, so that a chunk's copies need few address registers.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def ring_slot(block, g: gl.constexpr):
    """Slot and phase of the ``g``-th chunk of a block."""
    unit = block * 4 + g
    return unit % SLOTS, (unit // SLOTS) & 1


@gluon.jit
def _copy_item(tile, full, rows, live):
    """Copy an item's Q or dO."""
    for c in gl.static_range(4):
        part = tile.index(0).slice(c * CHUNK, CHUNK, dim=1)
        copy_async(part, rows + c * CHUNK, mask=live)
    arrive_when_copied(full.index(0), increment_count=False)


@gluon.jit
def _copy_item_in_parts(shared, query, upstream, live, count):
    """Copy an item's Q and dO, each part as soon as the last item's has come back."""
    for c in gl.static_range(4):
        mbarrier.wait(shared.qdo_empty.index(c), (count & 1) ^ 1)
        part = shared.q.index(0).slice(c * CHUNK, CHUNK, dim=1)
        copy_async(part, query + c * CHUNK, mask=live)
        if c == 3:
            arrive_when_copied(shared.q_full.index(0), increment_count=False)
        part = shared.do.index(0).slice(c * CHUNK, CHUNK, dim=1)
        copy_async(part, upstream + c * CHUNK, mask=live)
    arrive_when_copied(shared.do_full.index(0), increment_count=False)


@gluon.jit
def gather(walk, shared, query, upstream, local, pool, PARTS: gl.constexpr):
    """The warpgroup's part; ``PARTS`` as for ``scatter``."""
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS))
    block = 0
    count = 0
    for item in range(gl.program_id(0), walk.items, gl.num_programs(0)):
        at, first_head = walk.spread(item)
        blocks = gl.load(walk.PLAN + at)
        token = walk.token(at, first_head)
        window_row = token.window_row()
        index = token.load_indices(0, key)
        for j in range(blocks):
            used = token.used(index, j, key)
            row = token.key_rows(index, j, key, window_row, token.pool_start)
            index = token.load_indices(j + 1, key)
            in_window = j < token.window_blocks
            step = gl.where(in_window, local.t, pool.t)
            source = gl.where(in_window, local.batch(token), pool.batch(token))
            source = source + (row.to(gl.int64) * step * 8)[:, None] + column[None, :]
            for g in gl.static_range(4):
                slot, phase = ring_slot(block, g)
                mbarrier.wait(shared.k_empty.index(slot), phase ^ 1)
                piece = source + CHUNK_ORDER[g] * CHUNK
                copy_async(shared.k.index(slot), piece, mask=used[:, None])
                arrive_when_copied(shared.k_full.index(slot), increment_count=False)
            if j == 0:
                head = first_head + key
                live = (head < walk.heads)[:, None]
                if PARTS == 4:
                    q = query.heads(token, head, column)
                    do = upstream.heads(token, head, column)
                    _copy_item_in_parts(shared, q, do, live, count)
                else:
                    mbarrier.wait(shared.qdo_empty.index(0), (count & 1) ^ 1)
                    _copy_item(shared.q, shared.q_full, query.heads(token, head, column), live)
                    _copy_item(
                        shared.do, shared.do_full, upstream.heads(token, head, column), live
                    )
                count += 1
            block += 1
