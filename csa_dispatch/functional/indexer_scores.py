"""``indexer_scores``: the scores of picked entries alone, or of every one, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import differentiable_once
from ..transforms import outside_autocast, refuse_transforms
from .indexer import cast_by_autocast
from .indexer_checks import check_documents, check_operands, check_scale, check_scored
from .score_chunks import Chunk, ScoreArguments, chunks

Needs = tuple[bool, bool, bool]


def indexer_scores(
    index_query: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    kv_indices: Tensor | None = None,
    *,
    compress_ratio: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The lightning indexer's scores of picked entries, or of all, to train the indexer by.

    For slot k of token t, with the entry ``i = kv_indices[b, t, k]``::

        scores[b, t, k] = scale * sum_h weights[t, h] * relu(index_query[h, t] . index_keys[i])

    Without kv_indices slot k is row k of the pool, and used where that entry is complete: what
    ``indexer_kl_loss`` compares while an indexer warms up.

    An unused slot (negative, or at or past its pool's or document's length) scores -inf and has
    zero gradient, so that a softmax over slots leaves it out. Differentiable once in
    index_query, index_keys and weights; only inputs are kept for the backward, and neither
    direction holds more than 64 MiB of some tokens' ``[heads, K]`` products and gathered keys at
    a time. Products and sums are in fp32 (fp64 for fp64), the sum of a key's gradient over
    tokens too, and are rounded once.

    It runs as PyTorch operations on any device. On CUDA the gradient of ``index_keys`` adds up
    in an order that varies, unless torch's deterministic algorithms are on.

    Args:
        index_query: ``[B, H, T, D]`` float64, float32, bfloat16 or float16.
        index_keys: ``[B, S, D]`` in the query's dtype.
        weights: ``[B, T, H]`` in the query's dtype or float32.
        kv_indices: int32 or int64 ``[B, T, K]``, as ``lightning_indexer`` returns them.
            Causality is theirs.
        compress_ratio: without kv_indices, tokens an entry: every causally complete entry is
            scored, ``k < (t - document start + 1) // compress_ratio`` of its document. Rows
            that no token sees may hold anything.
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` offsets of packed documents along T and S (B
            is 1), both or none; indices then count from their document's first entry.
        scale: positive; None means ``1 / sqrt(H * D)``.

    Returns:
        float32 (float64 for float64 queries) ``[B, T, K]``, or ``[B, T, S]`` without
        kv_indices.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
        NotImplementedError: inside a torch.func transform that cannot apply.
    """
    refuse_transforms("indexer_scores")
    index_query, index_keys = cast_by_autocast(index_query, index_keys)
    check_operands(index_query, index_keys, weights)
    check_documents(index_query, cu_seqlens, cu_seqlens_k)
    check_scored(kv_indices, compress_ratio, index_query)
    check_scale(scale)
    default = (index_query.shape[1] * index_query.shape[3]) ** -0.5
    return torch.ops.csa_dispatch.indexer_scores(
        index_query,
        index_keys,
        weights,
        kv_indices,
        cu_seqlens,
        cu_seqlens_k,
        compress_ratio,
        default if scale is None else float(scale),
    )


_SCHEMA = (
    "Tensor index_query, Tensor index_keys, Tensor weights, Tensor? kv_indices, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k, SymInt? compress_ratio, float scale"
)


@torch.library.custom_op(
    "csa_dispatch::indexer_scores", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor"
)
def _indexer_scores(*values: Any) -> Tensor:
    arguments = ScoreArguments(*values)
    scores = arguments.index_query.new_full(
        arguments.shape, -torch.inf, dtype=arguments.accumulation
    )
    with outside_autocast(scores.device.type):
        for chunk in chunks(arguments):
            products = chunk.products().relu_()
            found = (chunk.weights[:, None] @ products)[:, 0] * arguments.scale
            chunk.part_of(scores).copy_(torch.where(chunk.used, found, -torch.inf))
    return scores


@_indexer_scores.register_fake
def _(*values: Any) -> Tensor:
    arguments = ScoreArguments(*values)
    return arguments.index_query.new_empty(arguments.shape, dtype=arguments.accumulation)


@torch.library.custom_op(
    "csa_dispatch::indexer_scores_backward",
    mutates_args=(),
    schema=f"(Tensor grad_scores, bool[] needs, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _indexer_scores_backward(
    grad_scores: Tensor, needs: Needs, *values: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_query, index_keys and weights; an empty tensor for each not needed."""
    arguments = ScoreArguments(*values)
    query, _, weights = (
        torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if needed
        else grad_scores.new_empty(0)
        for tensor, needed in zip(arguments[:3], needs, strict=True)
    )
    shape = arguments.index_keys.shape if needs[1] else (0,)
    keys = grad_scores.new_zeros(shape, dtype=arguments.accumulation)
    with outside_autocast(grad_scores.device.type):
        for chunk in chunks(arguments):
            _add_gradients(chunk, grad_scores, arguments.scale, needs, (query, keys, weights))
    return query, keys.to(arguments.index_keys.dtype), weights


def _add_gradients(
    chunk: Chunk,
    grad_scores: Tensor,
    scale: float,
    needs: Needs,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    query, keys, weights = gradients
    upstream = chunk.part_of(grad_scores).to(chunk.query.dtype)
    upstream = torch.where(chunk.used, upstream, 0) * scale
    products = chunk.products()
    if needs[2]:
        found = (products.relu() @ upstream[..., None])[..., 0]
        weights[chunk.row, chunk.span] = found.to(weights.dtype)
    if not (needs[0] or needs[1]):
        return
    slopes = torch.where(products > 0, chunk.weights[..., None] * upstream[:, None], 0)
    if needs[0]:
        found = (slopes @ chunk.keys).transpose(0, 1)
        query[chunk.row, :, chunk.span] = found.to(query.dtype)
    if needs[1]:
        chunk.add_key_gradient(keys, slopes)


@_indexer_scores_backward.register_fake
def _(grad_scores: Tensor, needs: Needs, *values: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if needed
        else grad_scores.new_empty(0)
        for tensor, needed in zip(values[:3], needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:-2])
    ctx.scalars = inputs[-2:]


def _backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    found = torch.ops.csa_dispatch.indexer_scores_backward(
        grad_scores, needs, *ctx.saved_tensors, *ctx.scalars
    )
    gradients = (item if needed else None for item, needed in zip(found, needs, strict=True))
    return (*gradients, None, None, None, None, None)


_indexer_scores.register_autograd(_backward, setup_context=_setup_context)
differentiable_once("indexer_scores", _indexer_scores_backward)
