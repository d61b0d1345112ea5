"""The last step of the Hopper backward's dKV: fp32 sums to the gradient's dtype and order.

One program owns ROWS rows. The buffer's columns are permuted within each 16, as
``hopper_backward_scatter`` explains; this undoes it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["grad_b", "grad_t", "per_batch", "rows"])
def cast_kernel(DKV, GRAD, grad_b, grad_t, per_batch, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """GRAD ``[B, 1, per_batch, D]`` from DKV ``[rows, D]``; strides are in elements."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    stored = column // 16 * 16 + column % 8 // 2 * 4 + column // 8 % 2 * 2 + column % 2
    inside = (row < rows)[:, None]
    wide = row.to(tl.int64)
    value = tl.load(DKV + (wide * D)[:, None] + stored[None, :], inside)
    place = GRAD + (wide // per_batch * grad_b + wide % per_batch * grad_t)[:, None]
    tl.store(place + column[None, :], value.to(GRAD.dtype.element_ty), inside)
