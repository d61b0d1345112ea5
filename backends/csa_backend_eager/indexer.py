"""The lightning indexer in PyTorch operations, tile by tile, keeping a running top-k.

A tile is some tokens of one batch row against a run of entries. Only its scores exist at a time;
the best so far are merged with the next run's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch import IndexerCall, IndexerCapabilities, OneOf, Operation, visible_entries

from .largest import largest

TILE_BYTES = 64 * 2**20
"""Most that a tile's temporaries take, whatever T and S; one token may take more."""

ENTRIES = 4096
"""Entries of a tile."""

CAPABILITIES = IndexerCapabilities(dtype=OneOf(("float64", "float32", "bfloat16", "float16")))


class EagerIndexer(Operation):
    """Picks on any device, without a sync; the first of equal scores, in ascending order."""

    forward_capabilities = CAPABILITIES

    def forward(self, call: IndexerCall) -> Tensor:
        start, end = visible_entries(call)
        batch, _, tokens, _ = call.index_query.shape
        picks = start.new_full((batch, tokens, call.topk), -1)
        step = _tokens_of_tile(call)
        for row in range(batch):
            for first in range(0, tokens, step):
                span = slice(first, min(first + step, tokens))
                found = _picks(call, row, span, start[row, span], end[row, span])
                picks[row, span, : found.shape[1]] = found
        return picks


def _tokens_of_tile(call: IndexerCall) -> int:
    _, heads, _, head_dim = call.index_query.shape
    width = min(ENTRIES, max(call.index_keys.shape[1], 1))
    # Products a head, the scores with their masks and indices, the picks being merged.
    elements = heads * (width + head_dim) + 8 * width + 8 * call.topk
    return max(1, TILE_BYTES // (elements * _accumulation(call.index_query).itemsize))


def _accumulation(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _picks(call: IndexerCall, row: int, span: slice, start: Tensor, end: Tensor) -> Tensor:
    """Picks of the tokens ``span`` of a batch row, int32, ascending, then -1."""
    dtype = _accumulation(call.index_query)
    query = call.index_query[row, :, span].transpose(0, 1).to(dtype)  # [n, H, D]
    weights = call.weights[row, span].to(dtype)[:, None]  # [n, 1, H]
    start, end = start[:, None], end[:, None]
    best = query.new_empty(query.shape[0], 0)
    picks = start.new_empty(query.shape[0], 0)
    first, last = _seen_by_any(call, span, start, end)
    for begin in range(first, last, ENTRIES):
        entry = torch.arange(begin, min(begin + ENTRIES, last), device=start.device)
        keys = call.index_keys[row, begin : begin + len(entry)].to(dtype)
        products = (query.flatten(0, 1) @ keys.mT).relu_().view(*query.shape[:2], -1)
        scores = (weights @ products)[:, 0]
        # NaN and -inf are still scores: below all others, above what is not seen.
        lowest = torch.finfo(dtype).min
        scores = torch.where(scores > lowest, scores, lowest)
        scores.masked_fill_((entry < start) | (entry >= end), -torch.inf)
        scores = torch.cat((best, scores), dim=1)
        # What is kept of earlier runs stands in their order, before this one.
        best, place = largest(scores, min(call.topk, scores.shape[1]))
        entries = torch.cat((picks, entry.to(picks.dtype).expand(len(picks), -1)), dim=1)
        picks = entries.gather(1, place)
    return torch.where(best > -torch.inf, picks - start, -1)


def _seen_by_any(call: IndexerCall, span: slice, start: Tensor, end: Tensor) -> tuple[int, int]:
    """Rows of the pool that some token of ``span`` may see, as far as known without a sync."""
    rows = call.index_keys.shape[1]
    if call.cu_seqlens is None:
        return 0, min(rows, (call.past + span.stop) // call.compress_ratio)
    if start.device.type != "cpu":
        return 0, rows
    return int(start.min()), int(end.max())
