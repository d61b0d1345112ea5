"""Which tokens every compressed entry pools: tables computed on device, without a sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EntryTable(NamedTuple):
    """Where the block of each of ``S`` entries lies; all on one device.

    Attributes:
        first: int64 ``[S]``, the block's first token; 0 for spare rows.
        live: bool ``[S]``, False for spare rows, which hold no entry.
        has_previous: bool ``[S]``, whether a block of the same document comes before.
    """

    first: Tensor
    live: Tensor
    has_previous: Tensor


def pool_offsets(cu_seqlens: Tensor, compress_ratio: int) -> Tensor:
    """``cu_seqlens_k``: int32 ``[N + 1]`` offsets of ``len // compress_ratio`` entries each."""
    counts = cu_seqlens.diff() // compress_ratio
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def entry_table(
    tokens: int,
    compress_ratio: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    device: torch.device,
) -> EntryTable:
    """The table of ``tokens // compress_ratio`` entries, documents packed or not."""
    entry = torch.arange(tokens // compress_ratio, device=device)
    if cu_seqlens is None or cu_seqlens_k is None:
        return EntryTable(entry * compress_ratio, entry >= 0, entry > 0)
    document = torch.searchsorted(cu_seqlens_k[1:].contiguous(), entry, right=True)
    live = document < cu_seqlens.shape[0] - 1
    document = document.clamp(max=cu_seqlens.shape[0] - 2)
    within = entry - cu_seqlens_k[document]
    first = cu_seqlens[document] + within * compress_ratio
    return EntryTable(torch.where(live, first, 0), live, live & (within > 0))
