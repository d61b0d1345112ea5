"""Tiles: the pieces a call is cut into so that its working memory has a fixed bound.

A tile is a run of query tokens of one or more batch entries, with all heads. Inside a tile,
keys come in segments. Both are sized from ``workspace_bytes``, whatever T, S, K and W are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from csa_dispatch.call import Call

WORKSPACE_BYTES = 64 * 2**20
"""Bound on the temporary memory of one forward or backward on a CPU, in bytes.

Beside it a call allocates what it returns and, in the accumulation dtype, one gradient sum for
each KV gradient asked for and one copy of ``sparse_kv`` if it gathers more than a few rows. One
token and one key are the least a tile can hold: the bound assumes that 32 rows of ``[H, D]`` fit.
"""

ACCELERATOR_WORKSPACE_BYTES = 512 * 2**20
"""The same on other devices, where small tiles would cost more in launches than they save."""

TILE_TOKENS = 512
"""Most query tokens of a tile; from 128 on a CPU's time hardly depends on it."""

_ROWS_SHARE = 4  # a tile's rows get this part of the workspace, one in so many
_ROW_COPIES = 6  # query, grad_output, product, grad_query, and two for temporaries
_SLOT_BYTES = 40  # row, place and masks of a slot
_SCORE_COPIES = 3  # scores, their gradient, and a copy rounded to the value dtype
_BIAS_COPIES = 4  # bias and the masks it is made from
_KEY_COPIES = 4  # keys, their gradient, its overlap-added sum, and a temporary


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def workspace_bytes(call: Call) -> int:
    """The bound on temporary memory on the call's device."""
    on_cpu = call.query.device.type == "cpu"
    return WORKSPACE_BYTES if on_cpu else ACCELERATOR_WORKSPACE_BYTES


@dataclass(frozen=True)
class Tile:
    """Query tokens ``first_token .. first_token + blocks * block_tokens`` of some batches.

    The tokens form ``blocks`` blocks of ``block_tokens``: the unit whose tokens share one
    contiguous strip of window keys.
    """

    first_batch: int
    batches: int
    first_token: int
    blocks: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def batch_slice(self) -> slice:
        return slice(self.first_batch, self.first_batch + self.batches)

    @property
    def token_slice(self) -> slice:
        return slice(self.first_token, self.first_token + self.tokens)

    def tokens_of(self, table: Tensor) -> Tensor:
        """The tile's part of a ``[B, T, ...]`` table: ``[batches, tokens, ...]``."""
        return table[self.batch_slice, self.token_slice]

    def rows_of(self, tensor: Tensor, kv_heads: int) -> Tensor:
        """View ``[B, H, T, ...]`` as ``[batches, G, tokens, H / G, ...]``, token-major."""
        part = tensor[self.batch_slice, :, self.token_slice]
        return part.unflatten(1, (kv_heads, -1)).transpose(2, 3)


def tiles(call: Call) -> Iterator[Tile]:
    """Cut a call into tiles whose rows take at most their share of the workspace."""
    batch, heads, tokens, head_dim = call.query.shape
    itemsize = accumulate_dtype(call.query.dtype).itemsize
    slots = 0 if call.kv_indices is None else call.kv_indices.shape[2]
    token_bytes = _ROW_COPIES * heads * head_dim * itemsize + _SLOT_BYTES * slots
    affordable = workspace_bytes(call) // _ROWS_SHARE // token_bytes
    most = max(1, min(affordable, TILE_TOKENS))
    block = min(most, block_tokens(call.sliding_window_size))
    if tokens <= most:  # short sequences: several batch entries a tile
        step = most // max(tokens, 1)
        spans = [(0, 1, tokens)] if tokens <= block else _spans(tokens, block, most)
        for first in range(0, batch, step):
            for start, blocks, size in spans:
                yield Tile(first, min(step, batch - first), start, blocks, size)
        return
    for entry in range(batch):
        for start, blocks, size in _spans(tokens, block, most):
            yield Tile(entry, 1, start, blocks, size)


def block_tokens(window: int) -> int:
    """Tokens that share a window strip of ``block + W - 1`` keys.

    Larger blocks make larger matmuls but more masked scores. A quarter of the window was the
    fastest of 32, 64 and 128 tokens at W = 128.
    """
    return max(32, min(window // 4, 256))


def segment_keys(tile: Tile, call: Call, *, own_keys: bool) -> int:
    """Most keys a segment may have per query token for its tensors to fit the workspace.

    Args:
        own_keys: each token has keys of its own (gathered) instead of sharing them in a block.
    """
    heads, head_dim = call.query.shape[1], call.query.shape[3]
    itemsize = accumulate_dtype(call.query.dtype).itemsize
    owners = tile.tokens if own_keys else tile.blocks
    kv_heads = call.local_kv.shape[1]
    scores = tile.tokens * (_SCORE_COPIES * heads + _BIAS_COPIES * kv_heads)
    keys = _KEY_COPIES * owners * kv_heads * head_dim
    available = workspace_bytes(call) * (_ROWS_SHARE - 1) // _ROWS_SHARE
    return max(1, available // (tile.batches * (scores + keys) * itemsize))


def _spans(tokens: int, block: int, most: int) -> list[tuple[int, int, int]]:
    """Cut T tokens into (first token, blocks, tokens a block), the last ones smaller."""
    spans: list[tuple[int, int, int]] = []
    per_tile = max(1, most // block)
    start = 0
    while tokens - start >= block:
        blocks = min(per_tile, (tokens - start) // block)
        spans.append((start, blocks, block))
        start += blocks * block
    if start < tokens:
        spans.append((start, 1, tokens - start))
    return spans
