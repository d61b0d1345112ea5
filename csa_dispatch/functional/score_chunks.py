"""Some tokens at a time, with the keys that the indexer scores them against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call, TokenBounds, token_bounds

CHUNK_BYTES = 64 * 2**20
"""Most that the temporaries of some tokens take; one token may take more."""


class ScoreArguments(NamedTuple):
    """The arguments of ``indexer_scores``, checked."""

    index_query: Tensor
    index_keys: Tensor
    weights: Tensor
    kv_indices: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    compress_ratio: int | None
    scale: float

    @property
    def accumulation(self) -> torch.dtype:
        return torch.promote_types(self.index_query.dtype, torch.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scores."""
        batch, _, tokens, _ = self.index_query.shape
        indices = self.kv_indices
        return batch, tokens, self.index_keys.shape[1] if indices is None else indices.shape[2]


class Chunk(NamedTuple):
    """Some tokens of one batch row, in the accumulation dtype.

    Tokens that score nothing are 0 here, and so are keys that are not scored: either may hold
    NaN.

    Attributes:
        row: of the batch.
        span: the n tokens.
        query: ``[n, H, D]``.
        weights: ``[n, H]``.
        keys: ``[n, K, D]`` of each token's picks, or ``[K, D]``, the first K rows of the pool.
        rows: ``[n, K]``, where the picks' keys are; None for the pool's rows.
        used: bool ``[n, K]``, what is scored.
    """

    row: int
    span: slice
    query: Tensor
    weights: Tensor
    keys: Tensor
    rows: Tensor | None
    used: Tensor

    def products(self) -> Tensor:
        """``[n, H, K]``."""
        return self.query @ self.keys.mT

    def part_of(self, scores: Tensor) -> Tensor:
        """The chunk's ``[n, K]`` of ``[B, T, columns]``, a view."""
        return scores[self.row, self.span, : self.used.shape[1]]

    def add_key_gradient(self, gradient: Tensor, slopes: Tensor) -> None:
        """Add that of products whose gradient is ``slopes`` ``[n, H, K]`` to ``[B, S, D]``."""
        if self.rows is None:
            found = slopes.flatten(0, 1).mT @ self.query.flatten(0, 1)
            gradient[self.row, : found.shape[0]] += found
        else:
            found = (slopes.mT @ self.query).flatten(0, 1)
            gradient[self.row].index_add_(0, self.rows.flatten(), found)


def chunks(arguments: ScoreArguments) -> Iterator[Chunk]:
    """The tokens that may score something, in pieces whose temporaries fit ``CHUNK_BYTES``."""
    if not arguments.index_keys.shape[1] or not arguments.shape[2]:
        return iter(())
    return _entries(arguments) if arguments.kv_indices is None else _picks(arguments)


def _picks(arguments: ScoreArguments) -> Iterator[Chunk]:
    keys, indices, dtype = arguments.index_keys, arguments.kv_indices, arguments.accumulation
    assert indices is not None
    bounds = _bounds(arguments)
    start, length = 0, keys.shape[1]
    if bounds is not None and bounds.pool_start is not None and bounds.pool_end is not None:
        start = bounds.pool_start[..., None]
        length = bounds.pool_end[..., None] - start
    used = (indices >= 0) & (indices < length)
    rows = torch.where(used, indices + start, 0)
    # Gathered keys and their gradient, for each slot.
    for row, span in _pieces(arguments, 2 * indices.shape[2] * keys.shape[2]):
        seen, place = used[row, span], rows[row, span]
        gathered = keys[row].index_select(0, place.flatten()).to(dtype)
        gathered = gathered.view(*place.shape, -1).masked_fill(~seen[..., None], 0)
        yield Chunk(row, span, *_tokens(arguments, row, span, seen), gathered, place, seen)


def _entries(arguments: ScoreArguments) -> Iterator[Chunk]:
    keys, ratio, dtype = arguments.index_keys, arguments.compress_ratio, arguments.accumulation
    bounds = _bounds(arguments)
    assert ratio is not None
    assert bounds is not None
    assert bounds.pool_start is not None
    assert bounds.pool_end is not None
    tokens = arguments.shape[:2]
    start, end = bounds.pool_start.expand(tokens), bounds.pool_end.expand(tokens)
    for row, span in _pieces(arguments, 0):
        columns = keys.shape[1]
        if arguments.cu_seqlens is None:  # a document's span of the pool may lie anywhere
            columns = min(columns, span.stop // ratio)
        if not columns:
            continue
        entry = torch.arange(columns, device=keys.device)
        seen = (entry >= start[row, span, None]) & (entry < end[row, span, None])
        shown = keys[row, :columns].to(dtype).masked_fill(~seen.any(0)[:, None], 0)
        yield Chunk(row, span, *_tokens(arguments, row, span, seen), shown, None, seen)


def _pieces(arguments: ScoreArguments, own_keys: int) -> Iterator[tuple[int, slice]]:
    """Batch row and tokens of each chunk; ``own_keys`` elements are each token's own."""
    _, heads, tokens, head_dim = arguments.index_query.shape
    # Products with their derivative, and the query with its gradient.
    elements = own_keys + 3 * heads * (arguments.shape[2] + head_dim)
    step = max(1, CHUNK_BYTES // (elements * arguments.accumulation.itemsize))
    for row in range(arguments.shape[0]):
        for first in range(0, tokens, step):
            yield row, slice(first, min(first + step, tokens))


def _tokens(
    arguments: ScoreArguments, row: int, span: slice, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Query and weights of a chunk."""
    idle, dtype = ~seen.any(1), arguments.accumulation
    query = arguments.index_query[row, :, span].transpose(0, 1).to(dtype)
    weights = arguments.weights[row, span].to(dtype)
    return query.masked_fill(idle[:, None, None], 0), weights.masked_fill(idle[:, None], 0)


def _bounds(arguments: ScoreArguments) -> TokenBounds | None:
    """What an ``attention()`` call may address of the pool."""
    query, pool = arguments.index_query, arguments.index_keys[:, None]
    offsets = arguments.cu_seqlens, arguments.cu_seqlens_k
    ratio = arguments.compress_ratio
    call = Call(query, query, pool, arguments.kv_indices, None, *offsets, None, 0, ratio, 1.0)
    return token_bounds(call)
