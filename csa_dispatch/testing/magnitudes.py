"""How large the terms are that add up to each result: what a rounding error is relative to.

A gradient can be far smaller than the terms it is the sum of: a row with one key and no sink has
dquery exactly 0, and any arithmetic that rounds its output first gets that wrong by a rounding of
``|grad_output| * |key|``. So the epsilon term of a budget is relative to the root of the summed
squares of the terms, elementwise, which is the size of a sum of independent rounding errors.

With ``p``, ``dp`` and ``delta`` as in the oracle, ``up(x) = max(|x|, smallest normal)`` because
below the smallest normal number errors stop shrinking (fp16 probabilities), and
``rho = |up(output) * grad_output|`` (2-norm: delta's error from the rounding of the output)::

    output^2 = sum_j up(p_j)^2 value_j^2
    ds_j     = up(p_j * hypot(dp_j, delta))
    dquery^2 = scale^2 (sum_j ds_j^2 key_j^2 + (rho * sum_j p_j key_j)^2)
    dkv_j^2  = sum_rows (scale^2 (ds_j^2 + (p_j rho)^2) query^2 + up(p_j)^2 grad_output^2)
    dsink^2  = sum_rows exp(sink - lse)^2 (delta^2 + rho^2)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call

from .oracle import oracle_rows


class Magnitudes(NamedTuple):
    """Sizes of the terms behind each result, float64, elementwise in the results' shapes.

    ``logit`` is the largest size of a score, of its terms, or of a finite lse: an exponent that
    large carries its absolute rounding error into every probability.
    """

    output: Tensor
    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor | None
    attention_sink: Tensor | None
    logit: float


def magnitudes(call: Call, grad_output: Tensor) -> Magnitudes:
    """Compute the sizes by the formulas above; NaN where selected data is NaN."""
    device, scale = call.query.device, call.scale
    tiny = torch.finfo(call.query.dtype).tiny
    sink = call.attention_sink

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=torch.float64, device=device)

    output, dquery, dlocal = zeros(call.query), zeros(call.query), zeros(call.local_kv)
    dpool = None if call.sparse_kv is None else zeros(call.sparse_kv)
    dsink = None if sink is None else zeros(sink)
    logit = torch.zeros((), dtype=torch.float64, device=device)

    for row in oracle_rows(call):
        b, t = row.batch, row.token
        grad = grad_output.detach()[b, :, t].double().reshape(row.output.shape)
        alive = (row.lse != math.inf)[..., None]
        grad = torch.where(alive, grad, 0.0)
        delta = (grad * row.output).sum(-1, keepdim=True)
        rho = (grad * row.output.abs().clamp(min=tiny)).norm(dim=-1, keepdim=True)
        weight = torch.where(alive, row.weights.clamp(min=tiny), 0.0)
        ds = row.weights * torch.hypot(grad @ row.keys.mT, delta.expand_as(row.weights))
        ds = torch.where(alive, ds.clamp(min=tiny), 0.0)
        keys2, query2 = row.keys.square(), row.query.square()

        output[b, :, t] = (weight.square() @ keys2).flatten(0, 1)
        own = ds.square() @ keys2 + (rho * row.output).square()
        dquery[b, :, t] = scale**2 * own.flatten(0, 1)
        by_key = ds.square() + (row.weights * rho).square()
        dkv = scale**2 * by_key.mT @ query2 + weight.square().mT @ grad.square()
        cut = len(row.visible.local)
        dlocal[b].index_add_(1, _index(row.visible.local, device), dkv[:, :cut])
        if dpool is not None:
            dpool[b].index_add_(1, _index(row.visible.pool, device), dkv[:, cut:])
        if dsink is not None:
            dsink += (row.sink_weight.square() * (delta.square() + rho.square())[..., 0]).flatten()
        terms = scale * (query2 @ keys2.mT).sqrt()
        for size in (row.scores.abs(), terms, row.lse[row.lse.isfinite()].abs()):
            logit = torch.maximum(
                logit, size.nan_to_num(0.0, 0.0, 0.0).amax() if size.numel() else logit
            )

    return Magnitudes(
        output.sqrt(),
        dquery.sqrt(),
        dlocal.sqrt(),
        None if dpool is None else dpool.sqrt(),
        None if dsink is None else dsink.sqrt(),
        float(logit),
    )


def _index(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device, dtype=torch.int64)
