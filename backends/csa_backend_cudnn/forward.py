"""The forward on SM100, and what both directions share."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csa_dispatch import Call
from csa_dispatch.call_spec import stride_class

from .entry_points import entry_points
from .operands import build_operands


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of a call; see ``csa_dispatch.Backend.forward``."""
    operands = build_operands(call)
    output = torch.empty_like(call.query)
    if not output.numel():
        return output, call.query.new_empty(call.query.shape[:3], dtype=torch.float32)
    sink = call.attention_sink
    sink = None if sink is None else sink.detach().float().contiguous()
    with device_of(call.query):
        result = entry_points().forward(
            rows_by_token(call.query),
            operands.table,
            operands.indices,
            attn_sink=sink,
            softmax_scale=call.scale,
        )
    output.copy_(by_head(result["out"], call))
    # A row without keys has cuDNN's lse +inf.
    lse = torch.where(operands.lengths[:, None] > 0, result["lse"], -math.inf)
    if sink is not None:
        lse = torch.logaddexp(lse, sink)
    return output, by_head(lse, call).contiguous()


def by_token(tensor: Tensor) -> Tensor:
    """``[B, H, T, ...]`` as a contiguous ``[B * T, H, ...]``; no copy where it lies like that."""
    return tensor.detach().transpose(1, 2).flatten(0, 1).contiguous()


def rows_by_token(tensor: Tensor) -> Tensor:
    """``by_token`` for ``[B, H, T, D]``: the kernels read rows that start on 16 bytes."""
    rows = by_token(tensor)
    return rows if stride_class(rows) == "aligned" else rows.clone()


def by_head(tensor: Tensor, call: Call) -> Tensor:
    """``[B * T, H, ...]`` as a view ``[B, H, T, ...]``."""
    batch, _, tokens, _ = call.query.shape
    return tensor.unflatten(0, (batch, tokens)).transpose(1, 2)


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes ``tensor``'s device current; off CUDA, or when it is fake, there is none to be on."""
    if tensor.is_cuda and not isinstance(tensor, FakeTensor):
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
