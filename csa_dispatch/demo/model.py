"""A byte-level language model whose layers are the three V4 kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csa_dispatch import Call, Kind
from csa_dispatch.nn import CompressedSparseAttention, CSAConfig, LayerRecord

LAYERS = (Kind.WINDOW, Kind.WINDOW, Kind.GATHER, Kind.DENSE, Kind.GATHER, Kind.DENSE)
LABELS = {Kind.WINDOW: "window", Kind.GATHER: "CSA", Kind.DENSE: "HCA"}
"""What the V4 report calls the kinds."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; V4's own are in brackets where they are far away.

    Attributes:
        window: tokens of the sliding window (128).
        csa_ratio, hca_ratio: tokens an entry in CSA (4) and HCA (128) layers.
        top_k: entries a CSA token selects (512).
    """

    layers: tuple[Kind, ...] = LAYERS
    d_model: int = 128
    heads: int = 8
    head_dim: int = 32
    rope_dim: int = 16
    query_rank: int = 64
    output_groups: int = 2
    output_rank: int = 64
    feed_forward: int = 384
    window: int = 32
    csa_ratio: int = 4
    hca_ratio: int = 16
    top_k: int = 16
    index_heads: int = 8
    index_dim: int = 16

    def ratio(self, kind: Kind) -> int:
        """Tokens an entry of a layer of this kind; 0 for window layers."""
        return {Kind.WINDOW: 0, Kind.GATHER: self.csa_ratio, Kind.DENSE: self.hca_ratio}[kind]

    def layer(self, kind: Kind) -> CSAConfig:
        """A layer of this kind."""
        return CSAConfig(
            hidden_size=self.d_model,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            qk_rope_head_dim=self.rope_dim,
            q_lora_rank=self.query_rank,
            o_groups=self.output_groups,
            o_lora_rank=self.output_rank,
            sliding_window=self.window,
            compress_ratio=self.ratio(kind),
            indexer_ratios=(self.csa_ratio,) if kind is Kind.GATHER else (),
            index_n_heads=self.index_heads,
            index_head_dim=self.index_dim,
            index_topk=self.top_k,
        )


LayerObserver = Callable[[int, Call, Tensor, Tensor], None]
"""Sees every layer's attention: the layer's number from 0, its call, output and lse."""


class Block(nn.Module):
    """Attention and a gated feed-forward, each on a normalised residual stream."""

    def __init__(self, kind: Kind, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = CompressedSparseAttention(config.layer(kind))
        self.feed_norm = nn.RMSNorm(config.d_model)
        self.up = nn.Linear(config.d_model, 2 * config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.d_model, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, LayerRecord]:
        attended, record = self.attention(self.attention_norm(x), return_record=True)
        x = x + attended
        gate, value = self.up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value), record


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(256, config.d_model)
        self.blocks = nn.ModuleList(Block(kind, config) for kind in config.layers)
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, 256, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights of deviation 1/sqrt(fan in); what adds to the stream starts small."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2 or name.endswith("bias"):
                continue
            deviation = 1.0 if name.startswith("embedding") else weight.shape[1] ** -0.5
            if name.endswith(("o_b_proj.weight", "down.weight")):
                deviation /= math.sqrt(2 * len(self.blocks))
            if name.startswith("head"):
                deviation *= 0.1
            nn.init.normal_(weight, std=deviation)

    def forward(
        self, text: Tensor, observer: LayerObserver | None = None, *, index_loss: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Logits of the next byte and the indexers' loss.

        Args:
            text: int64 ``[B, T]`` bytes.
            observer: sees each layer's attention call.
            index_loss: work out the indexers' loss; else it is 0.

        Returns:
            logits ``[B, T, 256]``, and a scalar: the mean KL of the CSA layers' indexers.
        """
        x = self.embedding(text)
        losses: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x, record = block(x)
            if observer is not None:
                observer(number, record.call, record.output, record.lse)
            if record.indexer is not None and index_loss:
                losses.append(record.indexer_loss(every_entry=True))
        mean_loss = torch.stack(losses).mean() if losses else x.new_zeros(())
        return self.head(self.norm(x)), mean_loss


def parameter_count(config: ModelConfig) -> int:
    """Weights of a model of these sizes."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in ByteModel(config).parameters())


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in bits of each span: ``[B]`` from ``[B, T, 256]`` and ``[B, T]``."""
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view(targets.shape).mean(dim=1) / math.log(2)
