"""What the branches (window, gathered, dense) have in common: segments and KV gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .masking import fill_where
from .tiles import Tile, accumulate_dtype


class Segment(NamedTuple):
    """Some keys for every token of a tile; the tokens of a block share their keys.

    The tile's tokens are split into ``blocks`` blocks here: strips of the window branch, one
    block for the dense branch, one block per token for gathered keys.

    Attributes:
        keys: ``[batches, G, blocks, N, D]`` in the accumulation dtype. Finite in every row
            that is shared with a token that may not see it.
        bias: ``[batches, G or 1, blocks, tokens of a block, N]``, added to the logits: the
            log of how often the token sees the key, so 0 for once and -inf for never; NaN where
            a token sees a key whose non-finite values had to be taken out of ``keys``.
        place: where the keys' gradient goes; the branch that made the segment knows.
        largest: the largest magnitude among the keys, NaN when not known; 0 when no token reads
            a key that it does not see.
    """

    keys: Tensor
    bias: Tensor
    place: Tensor | int
    largest: float


class Branch(Protocol):
    """One source of keys."""

    source: Tensor
    """The ``[B, G, rows, D]`` tensor the keys come from."""

    def segments(self, tile: Tile) -> Iterator[Segment]:
        """The keys of a tile, in segments that fit the workspace."""
        ...

    def sees_a_key(self, tile: Tile) -> Tensor:
        """Whether each token sees any key of this branch: bool ``[batches, tokens]``."""
        ...

    def add_gradient(
        self, gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
    ) -> None:
        """Add gradients of ``segment.keys`` to the source's.

        ``rows`` has the keys' shape. ``tainted`` bool ``[batches, G, blocks, N]`` marks keys
        seen by a token whose result is NaN: their gradient becomes NaN.
        """
        ...


class KVGradient:
    """Gradient of a ``[B, G, rows, D]`` tensor, summed in the accumulation dtype."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        dtype = accumulate_dtype(source.dtype)
        # The row past the end takes what unused slots add.
        total = source.shape[:3].numel()
        self._all_sums = source.new_zeros(total + 1, source.shape[3], dtype=dtype)
        self._all_taint = source.new_zeros(total + 1, dtype=dtype)
        self.sums = self._all_sums[:total].view(source.shape)
        self.taint = self._all_taint[:total].view(source.shape[:3])

    def add_span(self, tile: Tile, first: int, rows: Tensor, tainted: Tensor) -> None:
        """Add ``rows`` ``[batches, G, n, D]`` to source rows ``first .. first + n``."""
        span = slice(first, first + rows.shape[2])
        self.sums[tile.batch_slice, :, span] += rows
        self.taint[tile.batch_slice, :, span] += tainted

    def add_at(self, index: Tensor, rows: Tensor, tainted: Tensor) -> None:
        """Add ``rows`` ``[n, D]`` at rows ``index`` ``[n]`` of the source flattened.

        The index ``B * G * rows``, one past the last row, stands for no row.
        """
        self._all_sums.index_add_(0, index, rows)
        self._all_taint.index_add_(0, index, tainted.to(self._all_taint.dtype))

    def result(self) -> Tensor:
        """The gradient in the source's dtype."""
        fill_where(self.sums, self.taint > 0, torch.nan)
        return self.sums.to(self.source.dtype)
