"""The portable backward: which kernels run, in what order."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, TokenBounds

from .key_gradient import dense_gradient, window_gradient
from .operands import operands_of
from .sink_gradient import sink_gradient
from .stored_gradient import stored_gradient
from .upstream import Upstream, token_gradient
from .window_rows import keeps_window


def backward(
    call: Call,
    bounds: TokenBounds | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> Gradients:
    """Gradients asked for by ``needs`` (query, local_kv, sparse_kv, attention_sink).

    Only the gathered pool's gradient differs by ``deterministic``: nothing else uses atomics.
    """
    operands = operands_of(call, bounds)
    upstream = Upstream(operands, output, lse, grad_output, torch.empty_like(lse))
    pool, sink = call.sparse_kv, call.attention_sink
    grad_query = torch.empty_like(call.query) if needs[0] else None
    grad_local = grad_pool = grad_sink = None

    window = needs[1] and keeps_window(operands)
    slots = needs[2] and operands.slots > 0 and operands.pool_rows > 0
    if window or slots:
        grad_local, grad_pool = stored_gradient(
            upstream, grad_query, window=window, slots=slots, deterministic=deterministic
        )
    else:
        token_gradient(upstream, grad_query)
    if needs[1] and grad_local is None:
        grad_local = window_gradient(upstream)
    if needs[2] and grad_pool is None and pool is not None:
        dense = call.kind is Kind.DENSE and pool.shape[2] > 0
        grad_pool = dense_gradient(upstream) if dense else torch.zeros_like(pool)
    if needs[3] and sink is not None:
        grad_sink = sink_gradient(upstream, sink)
    return Gradients(grad_query, grad_local, grad_pool, grad_sink)
