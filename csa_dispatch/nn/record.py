"""What one call of a layer asked of ``attention()``, and the loss its indexer learns from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..call import Call
from ..functional import indexer_kl_loss, indexer_scores
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
        """``indexer_kl_loss`` over the entries attention saw, differentiable in the indexer alone.

        Those are the picks, or after ``forward(..., dense=True)`` every complete entry.

        Args:
            every_entry: over every complete entry also where attention saw the picks alone.
                Works the window's logits out once more: heads weigh by attention over all
                entries.
            reduction: "mean", "sum" or "none".

        Over every entry, the scores are ``[B, T, S]``.

        Raises:
            ValueError: the layer has no indexer.
        """
        call, indexer = self.call, self.indexer
        if indexer is None or call.sparse_kv is None:
            raise ValueError(
                "the layer has no indexer; it must have one to have its loss. "
                "Skip layers whose record.indexer is None."
            )
        picks, lse, window_lse = call.kv_indices, self.lse, None
        if every_entry and picks is not None:
            # The denominator of lse lacks the entries that were not picked.
            picks, lse, window_lse = None, None, self._window_lse()
        documents = {"cu_seqlens": call.cu_seqlens, "cu_seqlens_k": call.cu_seqlens_k}
        ratio = indexer.compress_ratio if picks is None else None
        scores = indexer_scores(
            indexer.queries.query,
            indexer.keys,
            indexer.queries.weights,
            picks,
            compress_ratio=ratio,
            scale=indexer.scale,
            **documents,
        )
        return indexer_kl_loss(
            scores,
            call.query.detach(),
            call.sparse_kv.detach(),
            picks,
            lse,
            window_lse=window_lse,
            compress_ratio=ratio,
            scale=call.scale,
            reduction=reduction,
            **documents,
        )

    @torch.no_grad()
    def _window_lse(self) -> Tensor:
        """The lse of window and sink alone."""
        call = self.call
        _, lse = attention(
            call.query,
            call.local_kv,
            attention_sink=call.attention_sink,
            cu_seqlens=call.cu_seqlens,
            sliding_window_size=call.sliding_window_size,
            scale=call.scale,
            return_lse=True,
        )
        return lse
