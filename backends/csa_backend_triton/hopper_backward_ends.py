"""The memory-bound ends of the Hopper backward: delta before it, the cast of dKV after it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["out_b", "out_h", "out_t", "do_b", "do_h", "do_t", "heads", "tokens"])
def delta_kernel(
    OUT, DO, PLAN, DELTA,
    out_b, out_h, out_t, do_b, do_h, do_t, heads, tokens, rows,
    D: tl.constexpr, ROWS: tl.constexpr,
):
    """delta [B, H, T] = sum over D of out * dO, in fp32; one program owns ROWS tokens of a head.

    A token without keys gets exactly 0, whatever dO holds. Strides are in units of 8 elements.
    """
    blocks = tl.cdiv(tokens, ROWS)
    program = tl.program_id(0)
    b = program // (heads * blocks)
    h = program // blocks % heads
    t = program % blocks * ROWS + tl.arange(0, ROWS)
    inside = t < tokens
    column = tl.arange(0, D)
    wide_b, wide_h, wide_t = b.to(tl.int64), h.to(tl.int64), t.to(tl.int64)
    out = OUT + (wide_b * out_b + wide_h * out_h) * 8 + (wide_t * out_t * 8)[:, None]
    upstream = DO + (wide_b * do_b + wide_h * do_h) * 8 + (wide_t * do_t * 8)[:, None]
    o = tl.load(out + column[None, :], inside[:, None], 0.0).to(tl.float32)
    g = tl.load(upstream + column[None, :], inside[:, None], 0.0).to(tl.float32)
    row = b * tokens + t
    first = tl.load(PLAN + rows + row, inside, 0)
    pool_length = tl.load(PLAN + 3 * rows + row, inside, 0)
    delta = tl.where((first > t) & (pool_length == 0), 0.0, tl.sum(o * g, 1))
    tl.store(DELTA + (wide_b * heads + wide_h) * tokens + t, delta, inside)


@triton.jit(do_not_specialize=["grad_b", "grad_t", "per_batch", "rows"])
def cast_kernel(
    DKV, GRAD, grad_b, grad_t, per_batch, rows, D: tl.constexpr, ROWS: tl.constexpr
):
    """GRAD = DKV in the gradient's dtype, its columns put back in order.

    One program owns ROWS rows. See ``hopper_backward_scatter`` for the order. Strides are in
    elements.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    stored = column // 16 * 16 + column % 8 // 2 * 4 + column // 8 % 2 * 2 + column % 2
    inside = (row < rows)[:, None]
    wide = row.to(tl.int64)
    value = tl.load(DKV + (wide * D)[:, None] + stored[None, :], inside)
    place = GRAD + (wide // per_batch * grad_b + wide % per_batch * grad_t)[:, None]
    tl.store(place + column[None, :], value.to(GRAD.dtype.element_ty), inside)
