"""The sliding window: each block of query tokens against one contiguous strip of keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from csa_dispatch.call import Call, TokenBounds

from .branch import KVGradient, Segment
from .masking import shared_bias, take_out_nonfinite
from .tiles import Tile, accumulate_dtype, segment_keys
from .workspace import Workspace


class WindowBranch:
    """Keys ``max(window_start, t - W + 1) .. t`` of ``local_kv``.

    Block ``i`` of a tile reads the strip of ``reach`` rows before its first token up to its
    last token, and a band mask cuts out each token's window. The strips of successive blocks
    overlap, so they are overlapping views of one copy.
    """

    def __init__(self, call: Call, bounds: TokenBounds | None, workspace: Workspace) -> None:
        self.workspace = workspace
        self.source = call.local_kv
        self.call = call
        self.start = None if bounds is None else bounds.window_start
        self.window = min(call.sliding_window_size, call.query.shape[2])

    def segments(self, tile: Tile) -> Iterator[Segment]:
        if self.window == 0:
            return
        reach = self._reach(tile)
        length = reach + tile.block_tokens
        step = segment_keys(tile, self.call, own_keys=False)
        for first in range(0, length, step):
            width = min(step, length - first)
            strip = self._strip(tile, first - reach, width)
            finite, largest = take_out_nonfinite(strip)
            finite = finite.unfold(2, width, tile.block_tokens)
            seen = self._seen(tile, first - reach, width)
            bias = shared_bias(seen, finite, None, strip.dtype)
            keys = strip.unfold(2, width, tile.block_tokens).transpose(-1, -2)
            yield Segment(keys, bias, first, largest)

    def sees_a_key(self, tile: Tile) -> Tensor:
        device = self.source.device
        if self.start is None or self.window == 0:
            sees = torch.full((), self.window > 0, device=device)
            return sees.expand(tile.batches, tile.tokens)
        return tile.tokens_of(self.start) <= self._positions(tile)

    def add_gradient(
        self, gradient: KVGradient, tile: Tile, segment: Segment, rows: Tensor, tainted: Tensor
    ) -> None:
        assert isinstance(segment.place, int)
        first = tile.first_token - self._reach(tile) + segment.place
        if tile.blocks > 1:
            rows, tainted = _overlap_add(rows, tile), _overlap_add(tainted.to(rows.dtype), tile)
        else:
            rows, tainted = rows[:, :, 0], tainted[:, :, 0].to(rows.dtype)
        padding = max(0, -first)
        gradient.add_span(tile, first + padding, rows[:, :, padding:], tainted[:, :, padding:])

    def _reach(self, tile: Tile) -> int:
        """Rows before a block's first token that its strip needs, at most."""
        last_block = tile.first_token + (tile.blocks - 1) * tile.block_tokens
        return max(0, min(self.window - 1, last_block))

    def _strip(self, tile: Tile, offset: int, width: int) -> Tensor:
        """Copy the rows that the blocks' strips cover together, with zeros before row 0.

        The first block's strip is ``width`` rows from ``offset`` rows after the first token.
        """
        first = tile.first_token + offset
        last = first + width + tile.tokens - tile.block_tokens
        batches, kv_heads, _, head_dim = self.source[tile.batch_slice].shape
        shape = (batches, kv_heads, last - first, head_dim)
        strip = self.workspace.empty("strip", shape, accumulate_dtype(self.source.dtype))
        padding = max(0, -first)
        strip[:, :, :padding] = 0
        strip[:, :, padding:] = self.source[tile.batch_slice, :, first + padding : last]
        return strip

    def _positions(self, tile: Tile) -> Tensor:
        first = tile.first_token
        return torch.arange(first, first + tile.tokens, device=self.source.device)

    def _seen(self, tile: Tile, offset: int, width: int) -> Tensor:
        """The band: bool ``[batches or 1, 1, blocks, block_tokens, width]``.

        Key ``n`` of a block stands ``offset + n`` rows after the block's first token.
        """
        query = self._positions(tile).view(tile.blocks, tile.block_tokens, 1)
        key = query[:, :1] + torch.arange(offset, offset + width, device=query.device)
        oldest = (query - (self.window - 1)).clamp(min=0)
        if self.start is None:
            return ((key <= query) & (key >= oldest))[None, None]
        start = tile.tokens_of(self.start).reshape(-1, 1, tile.blocks, tile.block_tokens, 1)
        return (key <= query) & (key >= torch.maximum(oldest, start))


def _overlap_add(parts: Tensor, tile: Tile) -> Tensor:
    """Sum strips ``[batches, G, blocks, N, ...]`` that start ``block_tokens`` rows apart."""
    step, length = tile.block_tokens, parts.shape[3]
    batches, kv_heads = parts.shape[:2]
    pieces = -(-length // step)
    total = parts.new_zeros(batches, kv_heads, tile.blocks + pieces - 1, step, *parts.shape[4:])
    for piece in range(pieces):
        chunk = parts[:, :, :, piece * step : (piece + 1) * step]
        total[:, :, piece : piece + tile.blocks, : chunk.shape[3]] += chunk
    return total.flatten(2, 3)[:, :, : length + (tile.blocks - 1) * step]
