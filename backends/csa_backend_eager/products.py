"""The matmuls between a tile's rows and a segment's keys, batched over blocks.

Scores of a segment are ``[batches, G, blocks, tokens of a block, R, N]``; as matmul operands,
``by_block`` of them, ``[batches * G * blocks, tokens of a block * R, N]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .branch import Segment
from .workspace import Workspace


def empty_scores(workspace: Workspace, name: str, rows: Tensor, segment: Segment) -> Tensor:
    """Uninitialised scores of contiguous ``rows`` ``[batches, G, tokens, R, D]``."""
    batches, kv_heads, blocks, width, _ = segment.keys.shape
    tokens, heads = rows.shape[2] // blocks, rows.shape[3]
    shape = (batches, kv_heads, blocks, tokens, heads, width)
    return workspace.empty(name, shape, rows.dtype)


def by_block(scores: Tensor) -> Tensor:
    """Scores as one matrix per block."""
    return scores.view(-1, scores.shape[3] * scores.shape[4], scores.shape[5])


def add_rows_times_keys(scores: Tensor, rows: Tensor, segment: Segment, scale: float) -> None:
    """``scores += scale * rows @ keys^T``, in place."""
    matrices = by_block(scores)
    rows_by_block = rows.view(*matrices.shape[:2], -1)
    matrices.baddbmm_(rows_by_block, _keys(segment).transpose(1, 2), alpha=scale)


def cover_unseen(
    scores: Tensor, segment: Segment, rows_largest: float, scale: float, value: float
) -> None:
    """Overwrite with ``value`` the scores of keys that their token does not see.

    Done only when a product of such a key and a row may have overflowed: then no bias of -inf
    and no probability of 0 would take it away. ``rows_largest`` is as ``masking.largest``.
    """
    bound = rows_largest * segment.largest * segment.keys.shape[-1] * max(scale, 1.0)
    if not bound < torch.finfo(scores.dtype).max / 2:
        scores.masked_fill_((segment.bias == -torch.inf).unsqueeze(-2), value)


def add_scores_times_keys(rows: Tensor, scores: Tensor, segment: Segment, scale: float) -> None:
    """``rows += scale * scores @ keys``, in place."""
    matrices = by_block(scores)
    rows.view(*matrices.shape[:2], -1).baddbmm_(matrices, _keys(segment), alpha=scale)


def add_scores_times_rows(keys: Tensor, scores: Tensor, rows: Tensor, scale: float) -> None:
    """``keys += scale * scores^T @ rows``, in place: for each key a sum over its block's rows.

    Args:
        keys: contiguous, of the shape of ``segment.keys``.
    """
    transposed, rows_by_block = _for_keys(scores, rows)
    keys.flatten(0, 2).baddbmm_(transposed, rows_by_block, alpha=scale)


def scores_times_rows(keys: Tensor, scores: Tensor, rows: Tensor) -> None:
    """``keys = scores^T @ rows``: as ``add_scores_times_rows``, whatever ``keys`` held."""
    torch.bmm(*_for_keys(scores, rows), out=keys.flatten(0, 2))


def _for_keys(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    matrices = by_block(scores)
    return matrices.transpose(1, 2), rows.view(*matrices.shape[:2], -1)


def _keys(segment: Segment) -> Tensor:
    return segment.keys.flatten(0, 2)
