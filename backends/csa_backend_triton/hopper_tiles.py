"""How the Hopper kernels read a call's plan and walk a token's keys.

A token's keys come in blocks of 64: first its window rows of ``local_kv``, oldest first, then
its slots. See ``hopper_plan`` for the table.
"""

from __future__ import annotations

from .gluon_compat import gl, gluon


@gluon.jit
def load_blocks(PLAN, item, items, head_blocks):
    """Key blocks of an item; past the last item, of the last one (read ahead, not used)."""
    return gl.load(PLAN + gl.minimum(item, items - 1) // head_blocks)


@gluon.jit
def item_plan(PLAN, item, head_blocks, tokens, rows):
    """-> batch, token, first head, first window row, window blocks, pool start, pool length."""
    row = item // head_blocks
    t = row % tokens
    first = gl.load(PLAN + rows + row)
    pool_start = gl.load(PLAN + 2 * rows + row)
    pool_length = gl.load(PLAN + 3 * rows + row)
    first_head = (item % head_blocks) * 64
    return row // tokens, t, first_head, first, (t - first + 64) // 64, pool_start, pool_length


@gluon.jit
def token_plan(PLAN, item, tokens, rows):
    """Item -> batch, token, first head, blocks, and what ``item_plan`` gives.

    Head blocks are outermost, and consecutive items are 1/128 of all tokens apart.
    """
    i = item % rows
    group = i % 128
    row = group * (rows // 128) + gl.minimum(group, rows % 128) + i // 128
    t = row % tokens
    blocks = gl.load(PLAN + row)
    first = gl.load(PLAN + rows + row)
    pool_start = gl.load(PLAN + 2 * rows + row)
    pool_length = gl.load(PLAN + 3 * rows + row)
    window_blocks = (t - first + 64) // 64
    return row // tokens, t, item // rows * 64, blocks, first, window_blocks, pool_start, pool_length


@gluon.jit
def load_indices(index_row, j, window_blocks, slots, key):
    """Key block ``j``'s 64 indices; -1 in window blocks and past the last slot."""
    slot = (j - window_blocks) * 64 + key
    return gl.load(index_row + slot, mask=(slot >= 0) & (slot < slots), other=-1)


@gluon.jit
def key_rows(index, j, window_blocks, first, t, pool_start, pool_length, key):
    """Key block ``j``'s rows (of local_kv or sparse_kv) and which of its 64 slots are used."""
    in_window = j < window_blocks
    position = first + j * 64 + key
    used = gl.where(in_window, position <= t, (index >= 0) & (index < pool_length))
    row = gl.where(in_window, position, pool_start + index.to(gl.int32))
    return row, used
