"""Launcher of the sink's gradient: partial sums by program, then one sum a head."""

from __future__ import annotations

from torch import Tensor

from .launching import launch
from .sink_gradient_kernel import sink_gradient_kernel
from .upstream import Upstream

BLOCK = 1024


def sink_gradient(upstream: Upstream, sink: Tensor) -> Tensor:
    """Gradient of the attention sink, ``[H]`` in its own dtype."""
    batch, heads, tokens = upstream.lse.shape
    blocks = -(-batch * tokens // BLOCK)
    partial = upstream.lse.new_empty((heads, blocks))
    launch(
        sink_gradient_kernel,
        (blocks, heads),
        (sink.contiguous(), upstream.lse, upstream.delta, partial, tokens, batch * tokens),
        warps=4,
        BLOCK=BLOCK,
    )
    return partial.sum(1).to(sink.dtype)
