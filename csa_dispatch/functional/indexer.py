"""``lightning_indexer``: the entries each token attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..auxiliary import explained_by, plain, runner_of, traced_choice, traced_runner
from ..indexer_call import IndexerCall, IndexerSpec, indexer_spec_of
from ..transforms import any_autocast
from .indexer_checks import check_choice, check_documents, check_operands, check_scale

_CAST = (torch.float32, torch.bfloat16, torch.float16)
OPERATION = IndexerSpec.operation


def _checked(
    index_query: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    topk: int,
    *,
    compress_ratio: int,
    past: int = 0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
) -> IndexerCall:
    """The validated call."""
    index_query, index_keys = cast_by_autocast(index_query, index_keys)
    check_operands(index_query, index_keys, weights)
    check_documents(index_query, cu_seqlens, cu_seqlens_k)
    check_choice(topk, compress_ratio, past, cu_seqlens is not None)
    check_scale(scale)
    return IndexerCall(
        index_query, index_keys, weights, topk, compress_ratio, past, cu_seqlens, cu_seqlens_k
    )


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Query and keys in the dtype of a surrounding autocast, as ``attention()`` takes them."""
    if not any_autocast():
        return tensors
    if not all(isinstance(tensor, Tensor) and tensor.dtype in _CAST for tensor in tensors):
        return tensors
    query = tensors[0]
    if not torch.is_autocast_enabled(query.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(query.device.type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _plain(call: IndexerCall) -> bool:
    return plain(*call[:3], *call[6:])


def describe_lightning_indexer(*tensors: Any, **arguments: Any) -> IndexerSpec:
    """The IndexerSpec of ``lightning_indexer`` with these arguments, after the same checks."""
    call = _checked(*tensors, **arguments)
    return indexer_spec_of(call, tracing=not _plain(call))


@explained_by(describe_lightning_indexer)
def lightning_indexer(
    index_query: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    topk: int,
    *,
    compress_ratio: int,
    past: int = 0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """For each token, the ``topk`` entries of the largest score among those complete by then.

    DeepSeek-V4's lightning indexer::

        score(t, i) = scale * sum_h weights[t, h] * relu(index_query[h, t] . index_keys[i])

    over entries ``i < (past + t + 1) // compress_ratio``; products and sums in fp32 (fp64 for
    fp64). Picks have no gradient: nothing is recorded for autograd. ``indexer_scores`` gives
    the scores of picks, differentiably.

    Dispatched like ``attention()``: by the same backends, forcing, policies and receipts.

    Args:
        index_query: ``[B, H, T, D]`` float64, float32, bfloat16 or float16, any strides.
        index_keys: ``[B, S, D]`` in the query's dtype; S may be 0. Rows that no token sees may
            hold anything, NaN included.
        weights: ``[B, T, H]`` in the query's dtype or float32, of either sign.
        topk: picks a token, 1 or more; may exceed S.
        compress_ratio: tokens of an entry; 1 or more.
        past: tokens before the first of these, when decoding.
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` offsets of packed documents along T and S (B
            is 1), both or none. Entries of other documents are not seen, causality counts from
            the document's start, and picks count from its first entry, as ``attention()`` takes
            them.
        scale: positive multiplier of the scores, which changes no pick; checked, for calls made
            with the arguments of ``indexer_scores``.
        backend: run this backend or raise; None lets context, environment and policy choose. A
            context or environment that names a backend without an indexer leaves the choice
            to the policy.

    Returns:
        int32 ``[B, T, topk]``, contiguous: a token's ``min(topk, visible)`` distinct picks in no
        promised order, then -1. Of equal scores the lowest indices are picked by ``eager`` and
        ``triton``; foreign backends may pick others. Scores that are NaN have no promised
        order. Rows past the last document hold -1.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
        BackendRefused: the forced backend cannot run the call, or nothing can; with Reasons.
    """
    call = _checked(
        index_query,
        index_keys,
        weights,
        topk,
        compress_ratio=compress_ratio,
        past=past,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        scale=scale,
    )
    if not _plain(call):
        forced, _ = traced_choice(OPERATION, backend)
        return torch.ops.csa_dispatch.lightning_indexer(*call, forced)
    runner = runner_of(indexer_spec_of(call), backend)
    with torch.no_grad():
        return runner.forward(call)


@torch.library.custom_op(
    "csa_dispatch::lightning_indexer",
    mutates_args=(),
    schema=(
        "(Tensor index_query, Tensor index_keys, Tensor weights, SymInt topk, "
        "SymInt compress_ratio, SymInt past, Tensor? cu_seqlens, Tensor? cu_seqlens_k, "
        "str backend) -> Tensor"
    ),
)
def _lightning_indexer(*arguments: Any) -> Tensor:
    call = IndexerCall(*arguments[:-1])
    return traced_runner(indexer_spec_of(call, tracing=True), arguments[-1]).forward(call)


@_lightning_indexer.register_fake
def _(*arguments: Any) -> Tensor:
    query, topk = arguments[0], arguments[3]
    return query.new_empty(query.shape[0], query.shape[2], topk, dtype=torch.int32)
