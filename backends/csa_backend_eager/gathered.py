"""Gathered keys: every token has its own K rows of the pool, which its heads share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from csa_dispatch.call import Call, TokenBounds

from .branch import KVGradient, Segment
from .tiles import Tile, accumulate_dtype, segment_keys
from .workspace import Workspace


class GatheredBranch:
    """The rows of ``sparse_kv`` that ``kv_indices`` names; duplicates are just more rows."""

    def __init__(self, call: Call, bounds: TokenBounds | None, workspace: Workspace) -> None:
        assert call.sparse_kv is not None
        assert call.kv_indices is not None
        self.workspace = workspace
        self.source = call.sparse_kv
        self.call = call
        self.slots = Slots(call, bounds)

    def segments(self, tile: Tile) -> Iterator[Segment]:
        step = segment_keys(tile, self.call, own_keys=True)
        for first in range(0, self.slots.count, step):
            row, used = self.slots.rows(tile, slice(first, first + step))
            keys = self._gather(tile, row)
            keys.masked_fill_(~used[:, None, :, :, None], 0)
            bias = keys.new_zeros(used.shape).masked_fill_(~used, -torch.inf)
            yield Segment(keys, bias[:, None, :, None], torch.where(used, row, -1))

    def sees_a_key(self, tile: Tile) -> Tensor:
        return self.slots.any_used(tile)

    def add_gradient(
        self, gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
    ) -> None:
        assert isinstance(segment.place, Tensor)
        row = segment.place[:, None]
        flat = torch.where(row < 0, gradient.unused_row, row + self._bases(tile))
        gradient.add_at(flat.flatten(), rows.flatten(0, 3), tainted.flatten())

    def _bases(self, tile: Tile) -> Tensor:
        """Flat row of each (batch, KV head)'s pool row 0: ``[batches, G, 1, 1]``."""
        kv_heads, length = self.source.shape[1:3]
        first = tile.first_batch * kv_heads
        base = torch.arange(first, first + tile.batches * kv_heads, device=self.source.device)
        return (base * length).view(-1, kv_heads, 1, 1)

    def _gather(self, tile: Tile, row: Tensor) -> Tensor:
        """Pool rows ``row`` ``[batches, n, K]`` in the accumulation dtype, with G and D."""
        kv_heads, _, head_dim = self.source.shape[1:]
        dtype = accumulate_dtype(self.source.dtype)
        shape = (tile.batches, kv_heads, *row.shape[1:], head_dim)
        if self.source.is_contiguous():  # three times as fast as indexing three dimensions
            flat = (row[:, None] + self._bases(tile)).flatten()
            rows = self.workspace.empty("gathered", (flat.shape[0], head_dim), self.source.dtype)
            torch.index_select(self.source.view(-1, head_dim), 0, flat, out=rows)
            rows = rows.view(shape)
        else:
            device = row.device
            batch = torch.arange(tile.first_batch, tile.first_batch + tile.batches, device=device)
            kv_head = torch.arange(kv_heads, device=device)
            rows = self.source[batch.view(-1, 1, 1, 1), kv_head.view(-1, 1, 1), row[:, None]]
        return rows if rows.dtype == dtype else self.workspace.copy("keys", rows, dtype)


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
