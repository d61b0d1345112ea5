"""Dense pool keys: a tile's tokens share every pool row, and a mask or counts pick theirs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from csa_dispatch.call import Call, TokenBounds

from .branch import KVGradient, Segment
from .gathered import Slots
from .masking import shared_bias, take_out_nonfinite
from .tiles import Tile, accumulate_dtype, segment_keys
from .workspace import Workspace


class DenseBranch:
    """Pool rows ``pool_start .. pool_end`` of each token: the dense-compressed kind."""

    def __init__(self, call: Call, bounds: TokenBounds | None, workspace: Workspace) -> None:
        assert call.sparse_kv is not None
        self.workspace = workspace
        self.source = call.sparse_kv
        self.call = call
        assert bounds is not None
        assert bounds.pool_start is not None
        assert bounds.pool_end is not None
        self.start, self.end = bounds.pool_start, bounds.pool_end

    def segments(self, tile: Tile) -> Iterator[Segment]:
        start = tile.tokens_of(self.start).unsqueeze(-1)
        end = tile.tokens_of(self.end).unsqueeze(-1)
        for first, keys, finite, largest in pool_spans(
            self.call, self.workspace, tile, self._last_row(tile)
        ):
            row = torch.arange(first, first + keys.shape[3], device=keys.device)
            seen = ((row >= start) & (row < end))[:, None, None]
            yield Segment(keys, shared_bias(seen, finite, None, keys.dtype), first, largest)

    def sees_a_key(self, tile: Tile) -> Tensor:
        return tile.tokens_of(self.end) > tile.tokens_of(self.start)

    def add_gradient(
        self, gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
    ) -> None:
        add_pool_span(gradient, tile, segment, rows, tainted)

    def _last_row(self, tile: Tile) -> int:
        """End of the rows any token of the tile can see, known without reading the bounds."""
        assert self.call.compress_ratio is not None
        if self.call.cu_seqlens is not None:  # a document's span of the pool may lie anywhere
            return self.source.shape[2]
        complete = (tile.first_token + tile.tokens) // self.call.compress_ratio
        return min(self.source.shape[2], complete)


class CountedBranch:
    """Selected keys computed densely: bias ``log(count)`` of each pool row for each token.

    The same result as ``GatheredBranch``; faster when the pool is hardly larger than the
    selection, or when few heads share what would be gathered.
    """

    def __init__(self, call: Call, bounds: TokenBounds | None, workspace: Workspace) -> None:
        assert call.sparse_kv is not None
        self.workspace = workspace
        self.source = call.sparse_kv
        self.call = call
        self.slots = Slots(call, bounds)

    def segments(self, tile: Tile) -> Iterator[Segment]:
        row, used = self.slots.rows(tile, slice(None))
        for first, keys, finite, largest in pool_spans(
            self.call, self.workspace, tile, self.source.shape[2]
        ):
            count = _counts(row - first, used, keys.shape[3], keys.dtype)[:, None, None]
            bias = shared_bias(count > 0, finite, count.log(), keys.dtype)
            yield Segment(keys, bias, first, largest)

    def sees_a_key(self, tile: Tile) -> Tensor:
        return self.slots.any_used(tile)

    def add_gradient(
        self, gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
    ) -> None:
        add_pool_span(gradient, tile, segment, rows, tainted)


def pool_spans(
    call: Call, workspace: Workspace, tile: Tile, last: int
) -> Iterator[tuple[int, Tensor, Tensor, float]]:
    """Pool rows ``0 .. last`` in pieces.

    Yields the first row, the keys ``[batches, G, 1, N, D]``, which were finite, and the largest.
    """
    assert call.sparse_kv is not None
    dtype = accumulate_dtype(call.query.dtype)
    step = segment_keys(tile, call, own_keys=False)
    for first in range(0, last, step):
        rows = call.sparse_kv[tile.batch_slice, :, None, first : min(first + step, last)]
        keys = workspace.copy("keys", rows, dtype)
        yield first, keys, *take_out_nonfinite(keys)


def add_pool_span(
    gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
) -> None:
    """Add the gradient of a segment that is a run of pool rows."""
    assert isinstance(segment.place, int)
    gradient.add_span(tile, segment.place, rows[:, :, 0], tainted[:, :, 0])


def _counts(row: Tensor, used: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """How often each token selects rows ``0 .. width``: ``[batches, n, width]``."""
    batches, tokens = row.shape[:2]
    total = batches * tokens * width
    base = torch.arange(0, total, width, device=row.device).view(batches, tokens, 1)
    inside = used & (row >= 0) & (row < width)
    flat = torch.where(inside, row + base, total).flatten()  # others fall off the end
    counts = torch.zeros(total + 1, dtype=dtype, device=row.device)
    counts.index_add_(0, flat, counts.new_ones(()).expand(flat.shape))
    return counts[:total].view(batches, tokens, width)
