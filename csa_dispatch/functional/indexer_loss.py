"""``indexer_kl_loss``: teaches the indexer where attention puts its mass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from csa_dispatch.autograd import differentiable_once
from csa_dispatch.transforms import outside_autocast, refuse_transforms

from .indexer_loss_checks import check_indexer_loss
from .teacher import Teacher, loss_and_gradient


def indexer_kl_loss(
    index_scores: Tensor,
    query: Tensor,
    sparse_kv: Tensor,
    kv_indices: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    window_lse: Tensor | None = None,
    compress_ratio: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence from attention's own distribution over compressed entries to the indexer's.

    For one query token with logits ``z_hk = scale * <query_h, entry_k>``, over its used slots k::

        target  = mass / sum_k mass,   mass_k = sum_h exp(z_hk - lse_h)
        predict = softmax_k(index_scores)
        loss    = sum_k target_k * (log target_k - log predict_k)

    The mass is each head's true attention: window and sink stay in its denominator, so heads that
    look elsewhere weigh less. It is worked out in log space with one common shift a token, the
    largest ``z_hk - lse_h`` of all heads and slots: tokens whose mass underflows still have a
    target. Tokens without mass (no used slot, or a sink of +inf) have loss 0 and gradient 0. Where
    lse or a used logit is NaN, so is the loss.

    The teacher is detached: the gradient, ``predict * sum(target) - target``, goes to index_scores
    alone. Works on some tokens at a time and keeps one ``[B, T, K]`` tensor for the backward.

    Args:
        index_scores: ``[B, T, K]``, the indexer's scores of the slots of kv_indices, or
            ``[B, T, S]`` of all entries without them; a floating-point dtype.
        query: ``[B, H, T, D]`` as ``attention()`` took it.
        sparse_kv: ``[B, 1, S, D]`` or ``[B, S, D]``, the compressed entries.
        kv_indices: ``[B, T, K]`` int32 or int64, the selected entries. Unused slots (negative, or
            at or past the pool length of the document) are in neither distribution whatever
            their scores hold. A repeated index is two slots, as in attention: each has the
            entry's mass and its own score.
        lse: ``[B, H, T]`` float32 (float64 for float64 queries), from ``attention(...,
            return_lse=True)`` of the same call.
        window_lse: instead of lse, that of window and sink alone, as from
            ``attention_with_window_lse``; the logits of the used slots are added to it here. So
            a teacher over all entries needs no attention over all entries.
        compress_ratio: without kv_indices, tokens an entry: every causally complete entry is
            used, ``k < (t - document start + 1) // compress_ratio``.
        scale: positive multiplier of the logits; None means 1/sqrt(D).
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` offsets of packed documents along T and S (B
            is 1). kv_indices count from their document's first entry; without them the columns
            of index_scores are the pool's rows.
        reduction: "mean" over the tokens that have mass (0 when none has), "sum", or "none".

    Returns:
        Loss in float32 (float64 for float64 queries): a scalar, or ``[B, T]`` for "none".

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
    """
    check_indexer_loss(
        index_scores,
        query,
        sparse_kv,
        kv_indices,
        lse,
        window_lse,
        compress_ratio,
        scale,
        cu_seqlens,
        cu_seqlens_k,
        reduction,
    )
    refuse_transforms("indexer_kl_loss")
    total_or_part = window_lse if lse is None else lse
    assert total_or_part is not None
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    pool = sparse_kv.squeeze(1) if sparse_kv.ndim == 4 else sparse_kv
    loss, counts, _ = torch.ops.csa_dispatch.indexer_kl_loss(
        index_scores,
        query.detach(),
        pool.detach(),
        kv_indices,
        total_or_part.detach(),
        cu_seqlens,
        cu_seqlens_k,
        compress_ratio,
        scale,
        lse is None,
        torch.is_grad_enabled() and index_scores.requires_grad,
    )
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / counts.sum().clamp(min=1)


@torch.library.custom_op(
    "csa_dispatch::indexer_kl_loss",
    mutates_args=(),
    schema=(
        "(Tensor index_scores, Tensor query, Tensor pool, Tensor? kv_indices, Tensor lse, "
        "Tensor? cu_seqlens, Tensor? cu_seqlens_k, SymInt? compress_ratio, float scale, "
        "bool add_entries, bool needs_grad) -> (Tensor, Tensor, Tensor)"
    ),
)
def _indexer_kl_loss(index_scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and whether it counts, ``[B, T]``, and its gradient ``[B, T, K]`` (or empty)."""
    with outside_autocast(index_scores.device.type):
        return loss_and_gradient(index_scores, Teacher(*arguments[:-1]), arguments[-1])


@_indexer_kl_loss.register_fake
def _(index_scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse, needs_grad = arguments[3], arguments[-1]
    loss = lse.new_empty(index_scores.shape[:2])
    gradient = lse.new_empty(index_scores.shape if needs_grad else (0,))
    return loss, torch.empty_like(loss, dtype=torch.bool), gradient


@torch.library.custom_op(
    "csa_dispatch::indexer_kl_loss_backward",
    mutates_args=(),
    schema="(Tensor grad_loss, Tensor gradient, Tensor index_scores) -> Tensor",
)
def _indexer_kl_loss_backward(grad_loss: Tensor, gradient: Tensor, index_scores: Tensor) -> Tensor:
    """Takes index_scores so that differentiating once more raises, instead of giving 0."""
    return (grad_loss[..., None] * gradient).to(index_scores.dtype)


@_indexer_kl_loss_backward.register_fake
def _(grad_loss: Tensor, gradient: Tensor, index_scores: Tensor) -> Tensor:
    del grad_loss
    return torch.empty_like(gradient, dtype=index_scores.dtype)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    ctx.save_for_backward(inputs[0], output[2])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    index_scores, gradient = ctx.saved_tensors
    found = torch.ops.csa_dispatch.indexer_kl_loss_backward(grad_loss, gradient, index_scores)
    return (found, *(None,) * 10)


_indexer_kl_loss.register_autograd(_backward, setup_context=_setup_context)
differentiable_once("indexer_kl_loss", _indexer_kl_loss_backward)
