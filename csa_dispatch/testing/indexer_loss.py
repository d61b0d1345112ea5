"""``indexer_kl_loss`` held to a float64 oracle: the definition, one token at a time, and budgets.

For a token with logits ``z_hk = scale * <query_h, entry_k>`` of its used slots::

    mass_k  = sum_h exp(z_hk - lse_h)         target  = mass / sum_k mass
    predict = softmax_k(score)                loss    = sum_k target_k log(target_k / predict_k)
    dscore  = predict * sum_k target_k - target

Mass is divided by its own largest term before it is summed, which changes no target and keeps
float64 from underflowing where fp32 does. ``lse`` is taken as given: its own rounding is not this
function's. With ``x`` the largest of ``|z|``, ``|lse|`` and ``|score|``, budgets are::

    |loss   - r| <= u (1 + sum_k target_k |log target_k - log predict_k|)
    |dscore - r| <= u (target + predict) + u_score |r|

with ``u = u32 (1 + x) (4 + sqrt(D + K))`` and one rounding of the gradient to the scores' dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .plain import accumulation_dtype


class LossCall(NamedTuple):
    """The arguments of one call; see ``csa_dispatch.functional.indexer_kl_loss``."""

    index_scores: Tensor
    query: Tensor
    sparse_kv: Tensor
    kv_indices: Tensor | None
    lse: Tensor
    compress_ratio: int | None
    scale: float
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


class LossOracle(NamedTuple):
    """Float64 results and what they may be off by.

    Attributes:
        loss, loss_budget: ``[B, T]``.
        counts: bool ``[B, T]``, tokens that have mass.
        gradient, gradient_budget: of ``sum(loss)``, ``[B, T, K]``; budget 0 where exactly 0.
    """

    loss: Tensor
    loss_budget: Tensor
    counts: Tensor
    gradient: Tensor
    gradient_budget: Tensor


def used_slots(call: LossCall, batch: int, token: int) -> list[tuple[int, int]]:
    """Column of index_scores and row of the pool of each used slot of a token."""
    pool = call.sparse_kv.shape[-2]
    first, low, high = 0, 0, pool
    if call.cu_seqlens is not None and call.cu_seqlens_k is not None:
        offsets, rows = call.cu_seqlens.tolist(), call.cu_seqlens_k.tolist()
        holds = [n for n in range(len(rows) - 1) if offsets[n] <= token < offsets[n + 1]]
        if not holds:
            return []
        first, low, high = offsets[holds[0]], rows[holds[0]], rows[holds[0] + 1]
    if call.kv_indices is not None:
        picks = call.kv_indices[batch, token].tolist()
        return [(k, low + i) for k, i in enumerate(picks) if 0 <= i < high - low]
    assert call.compress_ratio is not None
    complete = min((token - first + 1) // call.compress_ratio, high - low)
    return [(low + i, low + i) for i in range(complete)]


def indexer_loss_oracle(call: LossCall) -> LossOracle:
    """Loss of each token and the gradient of their sum, by definition."""
    batch, tokens, slots = call.index_scores.shape
    size = call.query.shape[-1]
    fine = torch.finfo(accumulation_dtype(call.query.dtype)).eps / 2
    pool = call.sparse_kv.detach().reshape(batch, -1, size)
    loss, budget = (torch.zeros(batch, tokens, dtype=torch.float64) for _ in range(2))
    counts = torch.zeros(batch, tokens, dtype=torch.bool)
    gradient, gradient_budget = (
        torch.zeros(batch, tokens, slots, dtype=torch.float64) for _ in range(2)
    )
    for b in range(batch):
        for t in range(tokens):
            used = used_slots(call, b, t)
            columns, rows = [k for k, _ in used], [row for _, row in used]
            logits = call.scale * (
                call.query[b, :, t].detach().double() @ pool[b, rows].double().T
            )
            share = logits - call.lse[b, :, t, None].detach().double()
            top = share.max() if used else torch.tensor(-math.inf)
            if top == -math.inf:
                continue
            mass = torch.exp(share - top).sum(0)
            target = mass / mass.sum()
            scores = call.index_scores[b, t, columns].detach().double()
            predict = scores.softmax(0)
            ratio = target.log() - scores.log_softmax(0)
            terms = torch.where(target > 0, target * ratio, 0.0)
            counts[b, t] = True
            loss[b, t] = terms.sum()
            gradient[b, t, columns] = predict * target.sum() - target
            sizes = (logits.abs().max(), call.lse[b, :, t].abs().max(), scores.abs().max())
            largest = max(float(item) for item in sizes if item < math.inf)
            unit = fine * (1 + largest) * (4 + math.sqrt(size + slots))
            budget[b, t] = unit * (1 + terms.abs().sum())
            rounding = torch.finfo(call.index_scores.dtype).eps / 2 * gradient[b, t, columns].abs()
            gradient_budget[b, t, columns] = unit * (target + predict) + rounding
    return LossOracle(loss, budget, counts, gradient, gradient_budget)
