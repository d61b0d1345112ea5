"""Gradient of the attention sink, first of two stages.

One program owns one head and BLOCK consecutive (batch, token) rows:

    PARTIAL[h, i] = - sum over its rows of exp(sink - lse) * delta

The launcher adds the partials. A sink of -inf, or of +inf (whose rows have lse = +inf), gives
exactly 0.
"""

import triton
import triton.language as tl

from .tiles import LOG2E


@triton.jit(do_not_specialize=["tokens", "rows"])
def sink_gradient_kernel(SINK, LSE, DELTA, PARTIAL, tokens, rows, BLOCK: tl.constexpr):
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = ((row // tokens).to(tl.int64) * heads + head) * tokens + row % tokens
    lse = tl.load(LSE + place, mask=row < rows, other=float("inf"))
    delta = tl.load(DELTA + place, mask=row < rows, other=0.0)
    sink = tl.load(SINK + head).to(tl.float32)
    share = tl.where(lse == float("inf"), 0.0, tl.exp2((sink - lse) * LOG2E) * delta)
    share = tl.where(sink == float("-inf"), 0.0, share)
    tl.store(PARTIAL + head * tl.num_programs(0) + tl.program_id(0), -tl.sum(share))
