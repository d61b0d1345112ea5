"""The lightning indexer's parts: its keys, its queries and its head weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional import lightning_indexer
from .compressor import Compressor
from .config import CSAConfig
from .rope import rotate
from .rows import Tokens


class IndexQueries(NamedTuple):
    """What the indexer scores entries with.

    Attributes:
        query: ``[B, Hi, T, Di]``.
        weights: ``[B, T, Hi]`` fp32.
    """

    query: Tensor
    weights: Tensor


class Scorer(nn.Module):
    """The linear map to the weights of the indexer's heads."""

    def __init__(
        self,
        config: CSAConfig,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads = config.index_n_heads
        self.weights_proj = nn.Linear(
            config.hidden_size, heads, bias=False, device=device, dtype=dtype
        )

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.weights_proj(hidden)
        return weights.to(torch.promote_types(weights.dtype, torch.float32))


class Indexer(Compressor):
    """A compressor at ``index_head_dim`` whose entries are keys, and queries for them.

    Trained by ``indexer_kl_loss`` alone: ``CompressedSparseAttention`` detaches what goes in.
    """

    def __init__(
        self,
        config: CSAConfig,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, config.index_head_dim, device=device, dtype=dtype)
        self.q_b_proj = nn.Linear(
            config.q_lora_rank,
            config.index_n_heads * config.index_head_dim,
            bias=False,
            device=device,
            dtype=dtype,
        )
        self.scorer = Scorer(config, device=device, dtype=dtype)

    @property
    def scale(self) -> float:
        """Of the scores: ``1 / sqrt(Hi Di)``."""
        return (self.config.index_n_heads * self.config.index_head_dim) ** -0.5

    def queries(self, tokens: Tokens) -> IndexQueries:
        """Queries and head weights of the tokens."""
        split = tokens.rows.split
        query = split(self.q_b_proj(tokens.residual))
        query = query.unflatten(-1, (-1, self.config.index_head_dim))
        query = rotate(query, tokens.positions, tokens.frequencies)
        return IndexQueries(query.transpose(1, 2), split(self.scorer(tokens.hidden)))

    def pick(self, queries: IndexQueries, keys: Tensor, **bounds: Any) -> Tensor:
        """The ``index_topk`` best entries of each token, int32 ``[B, T, K]``, -1 unused.

        Args:
            queries: of the tokens.
            keys: ``[B, S, Di]``.
            bounds: ``past``, or ``cu_seqlens`` and ``cu_seqlens_k``, of ``lightning_indexer``.
        """
        topk = max(1, min(self.config.index_topk, keys.shape[1]))
        ratio = self.config.compress_ratio
        return lightning_indexer(
            queries.query, keys, queries.weights, topk, compress_ratio=ratio, **bounds
        )
