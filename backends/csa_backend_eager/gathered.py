"""Gathered keys: every token has its own K rows of the pool, which its heads share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from csa_dispatch.call import Call, TokenBounds

from .branch import KVGradient, Segment
from .tiles import Tile, accumulate_dtype, segment_keys
from .workspace import Workspace


def copies_the_pool(tokens: int, slots: int, pool: int) -> bool:
    """Whether to gather from a copy of the pool, in one pass instead of three.

    Not where few tokens, as in decoding, gather fewer rows than half of the pool's.
    """
    return 2 * tokens * slots >= pool


class GatheredBranch:
    """The rows of ``sparse_kv`` that ``kv_indices`` names; duplicates are just more rows."""

    def __init__(self, call: Call, bounds: TokenBounds | None, workspace: Workspace) -> None:
        assert call.sparse_kv is not None
        assert call.kv_indices is not None
        self.workspace = workspace
        self.source = call.sparse_kv
        self.call = call
        self.slots = Slots(call, bounds)
        self.no_row = self.source.shape[:3].numel()
        self.copy: Tensor | None = None
        tokens, slots = call.kv_indices.shape[1:]
        if copies_the_pool(tokens, slots, self.source.shape[2]):
            # Flat and in the accumulation dtype, so that a gather is one pass; the row past the
            # end is 0 and stands for unused slots.
            dtype, head_dim = accumulate_dtype(self.source.dtype), self.source.shape[3]
            self.copy = self.source.new_empty(self.no_row + 1, head_dim, dtype=dtype)
            self.copy[:-1].view(self.source.shape).copy_(self.source)
            self.copy[-1] = 0

    def segments(self, tile: Tile) -> Iterator[Segment]:
        step = segment_keys(tile, self.call, own_keys=True)
        for first in range(0, self.slots.count, step):
            row, used = self.slots.rows(tile, slice(first, first + step))
            place = self._places(tile, row, used)
            keys = self._gather(tile, row, used, place)
            bias = keys.new_zeros(used.shape).masked_fill_(~used, -torch.inf)
            yield Segment(keys, bias[:, None, :, None], place, 0.0)

    def _gather(self, tile: Tile, row: Tensor, used: Tensor, place: Tensor) -> Tensor:
        """The slots' keys ``[batches, G, n, K, D]``, 0 where unused."""
        head_dim, dtype = self.source.shape[3], accumulate_dtype(self.source.dtype)
        keys = self.workspace.empty("keys", (*place.shape, head_dim), dtype)
        if self.copy is not None:
            torch.index_select(self.copy, 0, place.flatten(), out=keys.view(-1, head_dim))
            return keys
        entry = torch.arange(tile.first_batch, tile.first_batch + tile.batches, device=row.device)
        head = torch.arange(self.source.shape[1], device=row.device)
        keys.copy_(self.source[entry[:, None, None, None], head[:, None, None], row[:, None]])
        return keys.masked_fill_(~used[:, None, :, :, None], 0)

    def sees_a_key(self, tile: Tile) -> Tensor:
        return self.slots.any_used(tile)

    def add_gradient(
        self, gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
    ) -> None:
        assert isinstance(segment.place, Tensor)
        gradient.add_at(segment.place.flatten(), rows.flatten(0, 3), tainted.flatten())

    def _places(self, tile: Tile, row: Tensor, used: Tensor) -> Tensor:
        """Slots ``[batches, n, K]`` as rows of the flattened pool, ``[batches, G, n, K]``."""
        kv_heads, length = self.source.shape[1:3]
        first = tile.first_batch * kv_heads
        base = torch.arange(first, first + tile.batches * kv_heads, device=self.source.device)
        base = (base * length).view(tile.batches, kv_heads, 1, 1)
        return torch.where(used[:, None], row[:, None] + base, self.no_row)


class Slots:
    """``kv_indices`` turned into pool rows."""

    def __init__(self, call: Call, bounds: TokenBounds | None) -> None:
        assert call.sparse_kv is not None
        assert call.kv_indices is not None
        self.indices = call.kv_indices
        self.length = call.sparse_kv.shape[2]
        self.count = call.kv_indices.shape[2] if self.length else 0
        self.start = None if bounds is None else bounds.pool_start
        self.end = None if bounds is None else bounds.pool_end

    def rows(self, tile: Tile, slots: slice) -> tuple[Tensor, Tensor]:
        """Pool rows (0 when unused) and whether each slot is used: ``[batches, n, K]``.

        Compared in the indices' own dtype before any addition, so that fillers near the
        dtype's limits cannot wrap around.
        """
        index = tile.tokens_of(self.indices)[:, :, slots]
        if self.start is None or self.end is None:
            used = (index >= 0) & (index < self.length)
            return torch.where(used, index, 0).long(), used
        start = tile.tokens_of(self.start).unsqueeze(-1)
        used = (index >= 0) & (index < tile.tokens_of(self.end).unsqueeze(-1) - start)
        return torch.where(used, index + start, 0).long(), used

    def any_used(self, tile: Tile) -> Tensor:
        """Whether each token uses any slot: bool ``[batches, n]``."""
        return self.rows(tile, slice(None))[1].any(dim=-1)
