"""The indexer's teacher: attention's mass on compressed entries, some tokens at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, token_bounds

WORK, WORK_CUDA = 2**22, 2**26
"""Elements of gathered entries and logits in work at a time: 16 MiB in fp32, which a CPU's cache
nearly holds. A GPU needs more of them to outrun its launches."""


class Teacher(NamedTuple):
    """What the target is made of; see ``indexer_kl_loss``.

    Attributes:
        query: ``[B, H, T, D]``.
        pool: ``[B, S, D]``.
        kv_indices: ``[B, T, K]``, or None for all complete entries.
        lse: ``[B, H, T]``.
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]``, or None.
        compress_ratio: tokens an entry, without kv_indices.
        scale: multiplier of the logits.
        add_entries: whether the used slots' own logits are yet to be added to lse.
    """

    query: Tensor
    pool: Tensor
    kv_indices: Tensor | None
    lse: Tensor
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    compress_ratio: int | None
    scale: float
    add_entries: bool


class _Slots(NamedTuple):
    """``n`` tokens of one row of the batch.

    Attributes:
        columns: how many of the K slots are worked out; the others are unused.
        logits: ``[n, H, columns]`` in lse's dtype; anything where not used.
        used: bool ``[n, columns]``.
    """

    columns: int
    logits: Tensor
    used: Tensor


def loss_and_gradient(
    index_scores: Tensor, teacher: Teacher, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and whether the token has mass, ``[B, T]``; dloss/dscores, ``[B, T, K]`` or empty."""
    batch, tokens, slots = index_scores.shape
    lse = teacher.lse
    loss = lse.new_zeros(batch, tokens)
    counts = lse.new_zeros((batch, tokens), dtype=torch.bool)
    gradient = lse.new_zeros(index_scores.shape if needs_grad else (0,))
    spans = _spans(teacher)
    _, heads, _, size = teacher.query.shape
    each = slots * (heads + (0 if teacher.kv_indices is None else size))
    work = WORK_CUDA if lse.is_cuda else WORK
    step = max(1, work // max(1, each))
    for row in range(batch):
        for begin in range(0, tokens, step):
            here = slice(begin, min(begin + step, tokens))
            found = _slots(teacher, spans, row, here)
            if not found.columns:
                continue
            scores = index_scores[row, here, : found.columns].to(lse.dtype)
            target, has_mass = _target(found, lse[row, :, here].T[..., None], teacher.add_entries)
            used = found.used & has_mass
            # Rows without a used slot take part as zeros, not as a softmax over nothing.
            log_predict = scores.masked_fill(~found.used, -math.inf)
            log_predict = log_predict.masked_fill(~has_mass, 0).log_softmax(-1)
            terms = target.xlogy(target) - torch.where(target > 0, target * log_predict, 0)
            loss[row, here] = terms.masked_fill_(~used, 0).sum(-1)
            counts[row, here] = has_mass[:, 0]
            if needs_grad:
                difference = log_predict.exp() * target.sum(-1, keepdim=True) - target
                gradient[row, here, : found.columns] = difference.masked_fill_(~used, 0)
    return loss, counts, gradient


def _target(slots: _Slots, lse: Tensor, add_entries: bool) -> tuple[Tensor, Tensor]:
    """Target ``[n, columns]`` and whether the token has mass, ``[n, 1]``; lse ``[n, H, 1]``."""
    logits = slots.logits.masked_fill(~slots.used[:, None], -math.inf)
    if add_entries:
        lse = torch.logaddexp(lse, logits.logsumexp(-1, keepdim=True))
    share = (logits - lse).masked_fill_(~slots.used[:, None], -math.inf)
    shift = share.amax((1, 2))
    # NaN counts as mass: a broken attention has to show in the loss.
    has_mass = (shift != -math.inf)[:, None]
    mass = (share - shift[:, None, None]).exp_().sum(1).masked_fill_(~has_mass, 0)
    return mass / mass.sum(-1, keepdim=True).masked_fill_(~has_mass, 1), has_mass


def _spans(teacher: Teacher) -> tuple[Tensor, Tensor] | None:
    """First pool row of each token and one past its last, ``[B, T]``; None for the whole pool."""
    query = teacher.query
    pool = teacher.pool[:, None]
    call = Call(
        query,
        query[:, :1],
        pool,
        teacher.kv_indices,
        None,
        teacher.cu_seqlens,
        teacher.cu_seqlens_k,
        None,
        1,
        teacher.compress_ratio,
        teacher.scale,
    )
    bounds = token_bounds(call)
    if bounds is None or bounds.pool_start is None or bounds.pool_end is None:
        return None
    shape = query.shape[0], query.shape[2]
    return bounds.pool_start.expand(shape), bounds.pool_end.expand(shape)


def _slots(teacher: Teacher, spans: tuple[Tensor, Tensor] | None, row: int, here: slice) -> _Slots:
    query = teacher.query[row, :, here].transpose(0, 1)
    pool = teacher.pool[row]
    if spans is None:
        start, end = 0, pool.shape[0]
    else:
        start, end = spans[0][row, here, None], spans[1][row, here, None]
    if teacher.kv_indices is not None:
        index = teacher.kv_indices[row, here].long()
        used = (index >= 0) & (index < end - start)
        columns = index.shape[1] if pool.shape[0] else 0
        if not columns:
            return _Slots(0, query, used)
        rows = torch.where(used, index + start, 0)
        keys = pool.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return _Slots(columns, teacher.scale * _products(query, keys, teacher.lse.dtype), used)
    columns = pool.shape[0]
    if teacher.cu_seqlens is None:
        assert teacher.compress_ratio is not None
        columns = min(columns, here.stop // teacher.compress_ratio)
    entry = torch.arange(columns, device=pool.device)
    used = (entry >= start) & (entry < end)
    if not columns:
        return _Slots(0, query, used)
    logits = _products(query.flatten(0, 1)[None], pool[None, :columns], teacher.lse.dtype)
    return _Slots(columns, teacher.scale * logits[0].unflatten(0, query.shape[:2]), used)


def _products(query: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """``[n, M, D] x [n, K, D] -> [n, M, K]``, accumulated and returned in ``dtype``."""
    if query.is_cuda and query.dtype != dtype:
        return torch.bmm(query, keys.mT, out_dtype=dtype)
    return torch.bmm(query.to(dtype), keys.to(dtype).mT)
