# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
"""How the Hopper kernels of head_dim 128 copy a token's keys and heads to shared memory.

They are persistent and keep copying across items, so a copy is of the item at work or of the
next one.
"""

from .gluon_compat import copy_async, gl, gluon
from .hopper_tiles import Token

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
WIDTH = gl.constexpr(128)

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Four rows a thread: eight would need more registers for addresses.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def token_of(walk, item, SPREAD: gl.constexpr):
    """An item's token and its number of blocks, at least two, the last ones maybe unused.

    Two, so that what is on its way is never beyond the next item. Past the last item it is a
    token that sees nothing, so that nothing is read. Items are in SPREAD or natural order.
    """
    inside = item < walk.items
    item = gl.minimum(item, walk.items - 1)
    if SPREAD:
        at, first_head = walk.spread(item)
    else:
        at, first_head = walk.natural(item)
    blocks = gl.maximum(gl.load(walk.PLAN + at), 2)
    token = walk.token(at, first_head)
    token = Token(
        token.b,
        token.t,
        token.first_head,
        token.index_row,
        token.slots,
        gl.where(inside, token.window_rows, 0),
        token.window_blocks,
        token.pool_start,
        gl.where(inside, token.pool_length, 0),
        token.dense,
    )
    return token, blocks


@gluon.jit
def block_of(j, blocks, token, later):
    """Block ``j`` of a token of so many or, past them, of the later one: token and block."""
    inside = j < blocks
    source = Token(
        gl.where(inside, token.b, later.b),
        gl.where(inside, token.t, later.t),
        gl.where(inside, token.first_head, later.first_head),
        gl.where(inside, token.index_row, later.index_row),
        token.slots,
        gl.where(inside, token.window_rows, later.window_rows),
        gl.where(inside, token.window_blocks, later.window_blocks),
        gl.where(inside, token.pool_start, later.pool_start),
        gl.where(inside, token.pool_length, later.pool_length),
        token.dense,
    )
    return source, gl.where(inside, j, j - blocks)


@gluon.jit
def copy_heads(tile, tensor, token, live):
    """Start copying a token's 64 heads ``[64, 128]``, those that are not ``live`` as 0."""
    head = token.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    copy_async(tile, tensor.heads(token, head, column), mask=live[:, None])


@gluon.jit
def copy_keys(tile, token, j, index, local, pool):
    """Start copying a token's key block ``j``, unused rows as 0.

    Returns which keys are used, their rows of local_kv or sparse_kv, and which of both it is.
    """
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    used = token.used(index, j, key)
    row = token.key_rows(index, j, key, token.window_row(), token.pool_start)
    in_window = j < token.window_blocks
    step = gl.where(in_window, local.t, pool.t)
    source = gl.where(in_window, local.batch(token), pool.batch(token))
    source = source + (row.to(gl.int64) * step * 8)[:, None] + column[None, :]
    copy_async(tile, source, mask=used[:, None])
    return used, row, in_window
