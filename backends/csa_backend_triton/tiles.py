# pyright: reportGeneralTypeIssues=false
"""Device functions the kernels share: which rows a program owns and what those rows may see.

A *tile* is ``ROWS`` query rows of one KV head's group of ``GROUP`` query heads. A tile is
``SINGLE`` when all its rows are heads of one token (the selected slots are then the same for
all rows); otherwise rows are (token, head) pairs in token-major order, so a group smaller than
a tile shares it with the next tokens.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
WINDOW = tl.constexpr("window")
GATHER = tl.constexpr("gather")
DENSE = tl.constexpr("dense-compressed")


@triton.jit
def locate(program, tokens, GROUP: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr):
    """Batch (scalar), token (scalar if SINGLE), head in the group and validity of each row."""
    row = tl.arange(0, ROWS)
    if SINGLE:
        head_blocks: tl.constexpr = (GROUP + ROWS - 1) // ROWS
        flat = program // head_blocks
        head = (program % head_blocks) * ROWS + row
        batch = flat // tokens
        token = flat % tokens
        valid = head < GROUP
    else:
        blocks = tl.cdiv(tokens * GROUP, ROWS)
        batch = program // blocks
        flat = (program % blocks) * ROWS + row
        token = flat // GROUP
        head = flat % GROUP
        valid = token < tokens
    return batch, token, head, valid


@triton.jit
def token_value(TABLE, stride_b, stride_t, batch, token, valid, SINGLE: tl.constexpr):
    """``TABLE[batch, token]`` of an int32 table; 0 for rows that are not valid."""
    place = TABLE + batch.to(tl.int64) * stride_b + token.to(tl.int64) * stride_t
    return tl.load(place) if SINGLE else tl.load(place, mask=valid, other=0)


@triton.jit
def window_first(
    WINDOW_START,
    stride_b,
    stride_t,
    batch,
    token,
    valid,
    window,
    BOUNDED: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """First local row each query row sees; it sees up to its own token."""
    first = tl.maximum(token - window + 1, 0)
    if BOUNDED:
        start = token_value(WINDOW_START, stride_b, stride_t, batch, token, valid, SINGLE)
        first = tl.maximum(first, start)
    return first


@triton.jit
def last_used_slot(INDICES, stride_k, slots, span, SCAN: tl.constexpr):
    """One past the last slot of a token's indices that lies in ``0 .. span - 1``; 0 if none."""
    end = 0
    for begin in tl.range(0, slots, SCAN):
        slot = begin + tl.arange(0, SCAN)
        index = tl.load(INDICES + slot.to(tl.int64) * stride_k, mask=slot < slots, other=-1)
        used = (index >= 0) & (index < span)
        end = tl.maximum(end, tl.max(tl.where(used, slot + 1, 0)))
    return end


@triton.jit
def load_slots(INDICES, stride_k, slot, inside, span, start):
    """Pool rows (int64) of the slots that are ``inside``, and which of them are used."""
    index = tl.load(INDICES + slot.to(tl.int64) * stride_k, mask=inside, other=-1)
    used = (index >= 0) & (index < span)
    return index.to(tl.int64) + start, used


@triton.jit
def load_rows(
    base, offset, valid, stride_d, D: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr
):
    """Columns FIRST .. FIRST + COLUMNS - 1 of rows at ``base + offset``; 0 where not valid."""
    column = FIRST + tl.arange(0, COLUMNS)
    inside = valid[:, None]
    if FIRST + COLUMNS > D:
        inside = inside & (column < D)[None, :]
    return tl.load(base + offset[:, None] + (column * stride_d)[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    base,
    offset,
    valid,
    stride_d,
    values,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store columns FIRST .. FIRST + COLUMNS - 1 of rows at ``base + offset``."""
    column = FIRST + tl.arange(0, COLUMNS)
    inside = valid[:, None]
    if FIRST + COLUMNS > D:
        inside = inside & (column < D)[None, :]
    place = base + offset[:, None] + (column * stride_d)[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def finite_or_zero(x):
    """``x`` with NaN and Inf replaced by 0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, tl.zeros_like(x))


@triton.jit
def power_of_two(exponent):
    """``2 ** exponent`` in fp32 for int32 exponents; 0 below -126."""
    bits = (tl.maximum(exponent, -127) + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fitting_exponent(values, exponent):
    """Row-wise ``min(exponent, e)`` with ``values * 2**e`` inside fp16's range.

    fp16 holds 65504 at most, but scores' gradients of fp16 inputs may be larger or far smaller.
    The factor of a row is carried like softmax's running maximum: the accumulated row is
    rescaled when it falls.
    """
    top = tl.max(tl.abs(values), 1)
    magnitude = ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    return tl.minimum(exponent, 14 - magnitude)
