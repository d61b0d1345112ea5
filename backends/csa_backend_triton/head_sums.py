"""Device functions that sum a token's heads into key rows: ``P^T dO + dS^T Q``."""

import triton
import triton.language as tl

from .tiles import fitting_exponent, power_of_two


@triton.jit
def load_heads(base, head, stride_h, column, stride_d, valid, D: tl.constexpr):
    """``[heads, columns]`` of one token's rows; 0 where a head or column is not valid."""
    place = base + (head * stride_h)[:, None] + (column * stride_d)[None, :]
    return tl.load(place, mask=valid[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def sound_heads(LSE, DELTA, head, tokens, valid):
    """Heads whose row of this token is free of NaN and Inf, and takes part.

    A row with NaN or Inf anywhere has it in lse or delta too, and then in its P or dS: those
    carry it to the keys the row sees, so reading the row itself as 0 keeps it from the others.
    """
    lse = tl.load(LSE + head * tokens, mask=valid, other=float("inf"))
    delta = tl.load(DELTA + head * tokens, mask=valid, other=0.0)
    return valid & (tl.abs(lse) < float("inf")) & (tl.abs(delta) < float("inf"))


@triton.jit
def add_heads(acc, exponent, P, DS, place, mask, q, do, RANGE: tl.constexpr):
    """Add one block of heads; P and DS are read transposed, ``[keys, heads]``.

    With RANGE (fp16 inputs) ``acc`` holds the sum times ``2**exponent``, row by row.
    """
    p = tl.load(P + place, mask=mask, other=0.0)
    ds = tl.load(DS + place, mask=mask, other=0.0)
    if RANGE:
        lowered = fitting_exponent(ds, exponent)
        acc = acc * power_of_two(lowered - exponent)[:, None]
        exponent = lowered
        factor = power_of_two(exponent)[:, None]
        p = p * factor
        ds = ds * factor
    acc = tl.dot(p.to(do.dtype), do, acc, input_precision="ieee")
    acc = tl.dot(ds.to(q.dtype), q, acc, input_precision="ieee")
    return acc, exponent
