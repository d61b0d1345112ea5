"""What one call of a layer asked of ``attention()``, and the loss its indexer learns from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..call import Call
from ..functional import indexer_kl_loss, indexer_scores
from ..functional.past import complete_entries
from .indexer import IndexQueries


class IndexerRecord(NamedTuple):
    """What the indexer did; in its own graph alone.

    Attributes:
        queries: queries and head weights.
        keys: ``[B, S, Di]``.
        compress_ratio: tokens an entry.
        scale: multiplier of the scores.
    """

    queries: IndexQueries
    keys: Tensor
    compress_ratio: int
    scale: float


class LayerRecord(NamedTuple):
    """One call of a layer.

    Attributes:
        call: what ``attention()`` was called with, BHSD.
        output: ``[B, H, T, D]`` as it returned it, in the graph.
        lse: ``[B, H, T]``.
        indexer: None in layers without one.
    """

    call: Call
    output: Tensor
    lse: Tensor
    indexer: IndexerRecord | None

    def indexer_loss(self, *, every_entry: bool = False, reduction: str = "mean") -> Tensor:
        """``indexer_kl_loss``, differentiable in the indexer alone.

        Args:
            every_entry: over every complete entry, as while an indexer warms up, instead of the
                picked ones; for sequences that are not packed. Forms ``[B, T, S]`` scores, and
                works the window's logits out once more: heads weigh by attention over all entries.
            reduction: "mean", "sum" or "none".

        Raises:
            ValueError: the layer has no indexer, or ``every_entry`` with packed documents.
        """
        call, indexer = self.call, self.indexer
        if indexer is None or call.sparse_kv is None:
            raise ValueError("the layer has no indexer; it must have one to have its loss.")
        picks, lse, window_lse = call.kv_indices, self.lse, None
        if every_entry:
            if call.cu_seqlens is not None:
                raise ValueError("every_entry is True for packed documents; it must be False.")
            entries, ratio = indexer.keys.shape[1], indexer.compress_ratio
            picks = complete_entries(call.query, entries, 0, ratio)
            lse = None  # its denominator lacks the entries that were not picked
            with torch.no_grad():
                _, window_lse = attention(
                    call.query,
                    call.local_kv,
                    attention_sink=call.attention_sink,
                    sliding_window_size=call.sliding_window_size,
                    scale=call.scale,
                    return_lse=True,
                )
        assert picks is not None
        scores = indexer_scores(
            indexer.queries.query,
            indexer.keys,
            indexer.queries.weights,
            picks,
            scale=indexer.scale,
            cu_seqlens=call.cu_seqlens,
            cu_seqlens_k=call.cu_seqlens_k,
        )
        return indexer_kl_loss(
            scores,
            call.query.detach(),
            call.sparse_kv.detach(),
            picks,
            lse,
            window_lse=window_lse,
            scale=call.scale,
            reduction=reduction,
            cu_seqlens=call.cu_seqlens,
            cu_seqlens_k=call.cu_seqlens_k,
        )
