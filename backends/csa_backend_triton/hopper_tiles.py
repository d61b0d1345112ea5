# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""How the Hopper kernels address tensors and walk a token's keys.

A token's keys come in blocks of 64: first its window rows of ``local_kv``, oldest first, then
its slots. See ``hopper_plan`` for the table that says how many. Slots name rows of ``sparse_kv``
by their index or, when a walk is ``dense``, one after another: slot i is row pool_start + i.
"""

from .gluon_compat import aggregate, gl, gluon, mbarrier

SPAN = gl.constexpr(1024)
"""Rows that programs are spread over at a time.

Neighbouring tokens add to the same rows of the window's gradient, so programs keep apart; but the
rows they add to together must leave L2 to the pool's sums. Measured on an H200, backward at
T=131072 against programs spread over all rows: 0.90 of the time, window only 0.79.
"""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers ``[COUNT, 1]``, each complete after that many arrivals."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], layout)
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@aggregate
class Rows:
    """A tensor ``[B, H, T, 512]`` by its strides over B, H and T, in units of 8 elements."""

    pointer: gl.tensor
    b: gl.tensor
    h: gl.tensor
    t: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, b, h, t):
        self.pointer = pointer
        self.b = b
        self.h = h
        self.t = t

    @gluon.jit
    def either(self, other, odd):
        """This tensor, or the other where ``odd`` is 1."""
        return Rows(
            gl.where(odd == 1, other.pointer, self.pointer),
            gl.where(odd == 1, other.b, self.b),
            gl.where(odd == 1, other.h, self.h),
            gl.where(odd == 1, other.t, self.t),
        )

    @gluon.jit
    def heads(self, token, head, column):
        """Pointers ``[heads, columns]`` into one token's heads."""
        start = (
            self.pointer + token.b.to(gl.int64) * self.b * 8 + token.t.to(gl.int64) * self.t * 8
        )
        return start + (head.to(gl.int64) * self.h * 8)[:, None] + column[None, :]

    @gluon.jit
    def batch(self, token):
        """Pointer to a token's batch entry."""
        return self.pointer + token.b.to(gl.int64) * self.b * 8


@aggregate
class Token:
    """One (batch, token), 64 of its heads, and what it sees.

    ``index_row`` points to its indices; ``window_rows``, ``pool_start`` and ``pool_length`` are
    the plan's.
    """

    b: gl.tensor
    t: gl.tensor
    first_head: gl.tensor
    index_row: gl.tensor
    slots: gl.tensor
    window_rows: gl.tensor
    window_blocks: gl.tensor
    pool_start: gl.tensor
    pool_length: gl.tensor
    dense: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        b,
        t,
        first_head,
        index_row,
        slots,
        window_rows,
        window_blocks,
        pool_start,
        length,
        dense,
    ):
        self.b = b
        self.t = t
        self.first_head = first_head
        self.index_row = index_row
        self.slots = slots
        self.window_rows = window_rows
        self.window_blocks = window_blocks
        self.pool_start = pool_start
        self.pool_length = length
        self.dense = gl.constexpr(dense)

    @gluon.jit
    def window_row(self):
        """The window's first row of local_kv."""
        return self.t + 1 - self.window_rows

    @gluon.jit
    def load_indices(self, j, key):
        """Key block ``j``'s 64 indices; negative in the window, unused past the last slot."""
        slot = (j - self.window_blocks) * 64 + key
        if self.dense:
            return slot
        inside = (slot >= 0) & (slot < self.slots)
        return gl.load(self.index_row + slot, mask=inside, other=-1)

    @gluon.jit
    def used(self, index, j, key):
        """Which of key block ``j``'s 64 slots are used."""
        in_window = j < self.window_blocks
        chosen = (index >= 0) & (index < self.pool_length)
        return gl.where(in_window, j * 64 + key < self.window_rows, chosen)

    @gluon.jit
    def key_rows(self, index, j, key, window_row, pool_row):
        """Key block ``j``'s rows, given those of the window's first key and of index 0."""
        in_window = j < self.window_blocks
        return gl.where(in_window, window_row + j * 64 + key, pool_row + index.to(gl.int32))


@aggregate
class Walk:
    """A call's sizes, its indices and its plan: how a program finds its items.

    ``rows`` is ``B * T``. An item is 64 heads of one (batch, token); the first one's row is
    ``first_row``, or 0 if None.
    """

    PLAN: gl.tensor
    INDICES: gl.tensor
    indices_b: gl.tensor
    indices_t: gl.tensor
    heads: gl.tensor
    tokens: gl.tensor
    slots: gl.tensor
    rows: gl.tensor
    items: gl.tensor
    first_row: gl.tensor | gl.constexpr
    dense: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        PLAN,
        INDICES,
        indices_b,
        indices_t,
        heads,
        tokens,
        slots,
        rows,
        items,
        first_row,
        dense,
    ):
        self.PLAN = PLAN
        self.INDICES = INDICES
        self.indices_b = indices_b
        self.indices_t = indices_t
        self.heads = heads
        self.tokens = tokens
        self.slots = slots
        self.rows = rows
        self.items = items
        self.first_row = gl.constexpr(None) if first_row is None else first_row
        self.dense = gl.constexpr(dense)

    @gluon.jit
    def blocks_ahead(self, item):
        """Key blocks of an item in natural order, at least 1; any past the last item."""
        head_blocks = (self.heads + 63) // 64
        return gl.maximum(gl.load(self.PLAN + gl.minimum(item, self.items - 1) // head_blocks), 1)

    @gluon.jit
    def natural(self, item):
        """Row and first head of an item: a token's head blocks are neighbours."""
        head_blocks = (self.heads + 63) // 64
        return item // head_blocks, item % head_blocks * 64

    @gluon.jit
    def spread(self, item):
        """Row and first head of an item: neighbours are 1/128 of SPAN rows from each other.

        With a first row they are visited in natural order.
        """
        if self.first_row is not None:
            at, first_head = self.natural(item)
            return at + self.first_row, first_head
        i = item % self.rows
        start = i // SPAN * SPAN
        count = gl.minimum(self.rows - start, SPAN)
        i -= start
        group = i % 128
        row = start + group * (count // 128) + gl.minimum(group, count % 128) + i // 128
        return row, item // self.rows * 64

    @gluon.jit
    def place(self, row, first_head):
        """The token of a row, for results: nothing of its plan is read."""
        b, t = row // self.tokens, row % self.tokens
        return Token(b, t, first_head, self.INDICES, self.slots, t, t, t, t, self.dense)

    @gluon.jit
    def token(self, row, first_head):
        """The token of a row."""
        b, t = row // self.tokens, row % self.tokens
        index_row = self.INDICES + b.to(gl.int64) * self.indices_b
        index_row = index_row + t.to(gl.int64) * self.indices_t
        window_rows = gl.load(self.PLAN + self.rows + row)
        pool_start = gl.load(self.PLAN + 2 * self.rows + row)
        length = gl.load(self.PLAN + 3 * self.rows + row)
        blocks = (window_rows + 63) // 64
        return Token(
            b,
            t,
            first_head,
            index_row,
            self.slots,
            window_rows,
            blocks,
            pool_start,
            length,
            self.dense,
        )

    @gluon.jit
    def statistic(self, token, head):
        """Offsets of a token's heads in a ``[B, H, T]`` contiguous tensor."""
        return (token.b * self.heads + head).to(gl.int64) * self.tokens + token.t
