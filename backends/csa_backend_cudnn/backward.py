"""The backward on SM90 and SM100, fed with any forward's output and lse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from csa_dispatch import Call, Gradients
from csa_dispatch.call_spec import deterministic_mode, device_capability

from .entry_points import entry_points
from .forward import by_head, by_token, device_of, rows_by_token
from .operands import Operands, build_operands

Needs = tuple[bool, bool, bool, bool]

HOPPER = 90


def backward(
    call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, needs: Needs
) -> Gradients:
    """The gradients asked for; see ``csa_dispatch.Backend.backward``."""
    operands = build_operands(call)
    if not call.query.numel() or not operands.table.numel():
        return _zeros(call, needs)
    sink = call.attention_sink
    heads = call.query.shape[1]
    logit = call.query.new_full((heads,), -math.inf, dtype=torch.float32)
    if sink is not None:
        # A sink that takes all is told by lse alone, +inf: then every probability is 0.
        logit = torch.where(sink.detach() == math.inf, -math.inf, sink.detach().float())
    with device_of(call.query):
        found = entry_points().backward(
            rows_by_token(call.query),
            operands.table,
            rows_by_token(output),
            _upstream(call, operands, grad_output),
            by_token(lse_without_sink(lse, sink)),
            logit.contiguous(),
            operands.indices,
            softmax_scale=call.scale,
            topk_length=operands.lengths if walks_lengths(call.query) else None,
            deterministic=deterministic_mode(),
        )
    return _gradients(call, operands, found["dq"], found["dkv"], found["d_sink"], needs)


def walks_lengths(query: Tensor) -> bool:
    """Whether the kernels may stop at a token's last used slot: those of SM90 do.

    SM100's take a length as a promise that every slot before it is used.
    """
    return device_capability(query.device) == HOPPER


def lse_without_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    """``log(exp(lse) - exp(sink))`` for ``lse`` ``[B, H, T]``.

    Where the sink has all but everything this is inexact, and harmless: the kernels add the sink
    back, and the sum is as exact as ``lse``. It is kept finite there, since they take -inf for a
    row without keys.
    """
    if sink is None:
        return lse
    logit = sink.detach().to(lse.dtype)[:, None]
    rest = -torch.expm1(logit - lse)
    without = lse + rest.clamp(min=torch.finfo(lse.dtype).tiny).log()
    return torch.where(logit.isinf(), lse, without)


def _upstream(call: Call, operands: Operands, grad_output: Tensor) -> Tensor:
    """``grad_output`` as ``[B * T, H, D]``, zero in rows without keys.

    Those rows may hold NaN, which would reach d_sink through ``sum(output * grad_output)``.
    Where every token has a window there are none.
    """
    upstream = rows_by_token(grad_output)
    if call.sliding_window_size and call.cu_seqlens is None:
        return upstream
    return torch.where(operands.lengths[:, None, None] > 0, upstream, upstream.new_zeros(()))


def _gradients(
    call: Call,
    operands: Operands,
    grad_query: Tensor,
    rows: Tensor,
    grad_sink: Tensor,
    needs: Needs,
) -> Gradients:
    """The contract's gradients from cuDNN's: the table's is split."""
    local = pool = sink = None
    batch, cut = call.query.shape[0], operands.local_rows
    rows = rows.unflatten(0, (batch, -1))[:, None]
    if needs[1]:
        local = rows[:, :, :cut] if cut else torch.zeros_like(call.local_kv)
    if needs[2] and call.sparse_kv is not None:
        pool = rows[:, :, cut:]
    if needs[3] and call.attention_sink is not None:
        sink = grad_sink.to(call.attention_sink.dtype)
    return Gradients(by_head(grad_query, call) if needs[0] else None, local, pool, sink)


def _zeros(call: Call, needs: Needs) -> Gradients:
    inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
    return Gradients(
        *(
            torch.zeros_like(tensor) if need and tensor is not None else None
            for tensor, need in zip(inputs, needs, strict=True)
        )
    )
