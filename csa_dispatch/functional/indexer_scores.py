"""``indexer_scores``: the scores of picked entries alone, differentiable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call, token_bounds
from ..transforms import outside_autocast
from .indexer import cast_by_autocast
from .indexer_checks import check_documents, check_operands, check_picks, check_scale

CHUNK_BYTES = 64 * 2**20
"""Most that the temporaries of some tokens take; one token may take more."""

Needs = tuple[bool, bool, bool]


def indexer_scores(
    index_query: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    kv_indices: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The lightning indexer's scores of picked entries, to train the indexer by.

    For slot k of token t, with the entry ``i = kv_indices[b, t, k]``::

        scores[b, t, k] = scale * sum_h weights[t, h] * relu(index_query[h, t] . index_keys[i])

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
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` offsets of packed documents along T and S (B
            is 1), both or none; indices then count from their document's first entry.
        scale: positive; None means ``1 / sqrt(H * D)``.

    Returns:
        float32 (float64 for float64 queries) ``[B, T, K]``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
    """
    index_query, index_keys = cast_by_autocast(index_query, index_keys)
    check_operands(index_query, index_keys, weights)
    check_documents(index_query, cu_seqlens, cu_seqlens_k)
    check_picks(kv_indices, index_query)
    check_scale(scale)
    default = (index_query.shape[1] * index_query.shape[3]) ** -0.5
    return torch.ops.csa_dispatch.indexer_scores(
        index_query,
        index_keys,
        weights,
        kv_indices,
        cu_seqlens,
        cu_seqlens_k,
        default if scale is None else float(scale),
    )


class _Arguments(NamedTuple):
    index_query: Tensor
    index_keys: Tensor
    weights: Tensor
    kv_indices: Tensor
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    scale: float

    @property
    def accumulation(self) -> torch.dtype:
        return torch.promote_types(self.index_query.dtype, torch.float32)


class _Chunk(NamedTuple):
    """Some tokens of one batch row, in the accumulation dtype.

    Tokens without a used slot are 0 here, and so are keys of unused slots: either may hold NaN.
    """

    row: int
    span: slice
    query: Tensor  # [n, H, D]
    weights: Tensor  # [n, H]
    keys: Tensor  # [n, K, D]
    rows: Tensor  # [n, K], 0 where unused
    used: Tensor  # [n, K]

    def products(self) -> Tensor:
        return self.query @ self.keys.mT  # [n, H, K]


def _chunks(arguments: _Arguments) -> Iterator[_Chunk]:
    query, keys, weights, indices = arguments[:4]
    batch, heads, tokens, head_dim = query.shape
    slots, dtype = indices.shape[2], arguments.accumulation
    start, length = _spans(arguments)
    used = (indices >= 0) & (indices < length)
    rows = torch.where(used, indices + start, 0)
    # Gathered keys and their gradient, products with their derivative, the query's gradient.
    elements = 2 * slots * head_dim + 3 * heads * slots + 3 * heads * head_dim
    step = max(1, CHUNK_BYTES // (elements * dtype.itemsize))
    for row in range(batch):
        for first in range(0, tokens, step):
            span = slice(first, min(first + step, tokens))
            seen, place = used[row, span], rows[row, span]
            idle = ~seen.any(1)
            gathered = keys[row].index_select(0, place.flatten()).to(dtype)
            gathered = gathered.view(*place.shape, head_dim).masked_fill(~seen[..., None], 0)
            yield _Chunk(
                row,
                span,
                query[row, :, span].transpose(0, 1).to(dtype).masked_fill(idle[:, None, None], 0),
                weights[row, span].to(dtype).masked_fill(idle[:, None], 0),
                gathered,
                place,
                seen,
            )


def _spans(arguments: _Arguments) -> tuple[Tensor | int, Tensor | int]:
    """First row and number of rows of each token's pool, ``[1, T, 1]`` when packed."""
    query, keys = arguments.index_query, arguments.index_keys
    offsets = arguments.cu_seqlens, arguments.cu_seqlens_k
    if offsets[0] is None:
        return 0, keys.shape[1]
    # What a gather call may address.
    call = Call(
        query, query, keys[:, None], arguments.kv_indices, None, *offsets, None, 0, None, 1.0
    )
    bounds = token_bounds(call)
    assert bounds is not None
    assert bounds.pool_start is not None
    assert bounds.pool_end is not None
    return bounds.pool_start[..., None], (bounds.pool_end - bounds.pool_start)[..., None]


_SCHEMA = (
    "Tensor index_query, Tensor index_keys, Tensor weights, Tensor kv_indices, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k, float scale"
)


@torch.library.custom_op(
    "csa_dispatch::indexer_scores", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor"
)
def _indexer_scores(*values: Any) -> Tensor:
    arguments = _Arguments(*values)
    scores = arguments.index_query.new_full(
        arguments.kv_indices.shape, -torch.inf, dtype=arguments.accumulation
    )
    if not arguments.index_keys.shape[1]:
        return scores
    with outside_autocast(scores.device.type):
        for chunk in _chunks(arguments):
            products = chunk.products().relu_()
            found = (chunk.weights[:, None] @ products)[:, 0] * arguments.scale
            scores[chunk.row, chunk.span] = torch.where(chunk.used, found, -torch.inf)
    return scores


@_indexer_scores.register_fake
def _(*values: Any) -> Tensor:
    arguments = _Arguments(*values)
    return arguments.index_query.new_empty(
        arguments.kv_indices.shape, dtype=arguments.accumulation
    )


@torch.library.custom_op(
    "csa_dispatch::indexer_scores_backward",
    mutates_args=(),
    schema=f"(Tensor grad_scores, bool[] needs, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _indexer_scores_backward(
    grad_scores: Tensor, needs: Needs, *values: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_query, index_keys and weights; an empty tensor for each not needed."""
    arguments = _Arguments(*values)
    query, _, weights = (
        torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if needed
        else grad_scores.new_empty(0)
        for tensor, needed in zip(arguments[:3], needs, strict=True)
    )
    shape = arguments.index_keys.shape if needs[1] else (0,)
    keys = grad_scores.new_zeros(shape, dtype=arguments.accumulation)
    if arguments.index_keys.shape[1]:
        with outside_autocast(grad_scores.device.type):
            for chunk in _chunks(arguments):
                _add_gradients(chunk, grad_scores, arguments.scale, needs, (query, keys, weights))
    return query, keys.to(arguments.index_keys.dtype), weights


def _add_gradients(
    chunk: _Chunk,
    grad_scores: Tensor,
    scale: float,
    needs: Needs,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    query, keys, weights = gradients
    upstream = grad_scores[chunk.row, chunk.span].to(chunk.query.dtype)
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
        found = slopes.mT @ chunk.query
        keys[chunk.row].index_add_(0, chunk.rows.flatten(), found.flatten(0, 1))


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
    ctx.save_for_backward(*inputs[:-1])
    ctx.scale = inputs[-1]


def _backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    found = torch.ops.csa_dispatch.indexer_scores_backward(
        grad_scores, needs, *ctx.saved_tensors, ctx.scale
    )
    gradients = (item if needed else None for item, needed in zip(found, needs, strict=True))
    return (*gradients, None, None, None, None)


_indexer_scores.register_autograd(_backward, setup_context=_setup_context)
