"""The forward: operands in, FA4's kernel, output and lse as the contract has them."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csa_dispatch import Call

from .entry_points import entry_points
from .operands import build_operands, dense, kernel_input


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes ``tensor``'s device current; fake tensors have none to be on (FA4 then compiles)."""
    if tensor.is_cuda and not isinstance(tensor, FakeTensor):
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of a call; see ``csa_dispatch.Backend.forward``."""
    operands = build_operands(call)
    output = torch.empty_like(call.query)
    # Fresh memory starts on 64 bytes or more and its rows are 1 KiB: unit stride is all to ask.
    direct = output.stride(-1) == 1
    sink = None if call.attention_sink is None else dense(call.attention_sink.detach())
    with device_of(call.query):
        result, lse, *_ = entry_points().forward(
            q=None,
            k=None,
            v=operands.table,
            qv=kernel_input(call.query.detach().transpose(1, 2)),
            softmax_scale=call.scale,
            learnable_sink=sink,
            pack_gqa=True,
            return_lse=True,
            out=output.transpose(1, 2) if direct else None,
            gather_kv_indices=operands.indices,
            # Nothing is kept for the backward, whose contract is output and lse.
            gather_bwd_recompute_p=True,
        )
    if not direct:
        output.copy_(result.transpose(1, 2))
    return output, contract_lse(lse, output, sink)


def contract_lse(lse: Tensor, output: Tensor, sink: Tensor | None) -> Tensor:
    """FA4's lse ``[B, T, H]`` as the contract's ``[B, H, T]``: natural log, sink included.

    FA4 departs from it in two places. It folds the sink in relative to the largest score, so a
    sink more than 88 above that overflows to +inf: there lse is the sink to fp32's last bit.
    And a row whose scores are NaN, which has a NaN output, gets -inf.
    """
    result = dense(lse.transpose(1, 2))
    if sink is not None:
        result = torch.where(result == math.inf, sink.to(result.dtype)[:, None], result)
    return result.masked_fill_(output[..., 0].isnan(), math.nan)
