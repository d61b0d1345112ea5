"""Small layers of every kind, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from csa_dispatch.nn import CompressedSparseAttention, CSAConfig, Yarn

KINDS = {
    "window": {"compress_ratio": 0},
    "csa": {"compress_ratio": 4},
    "hca": {"compress_ratio": 8},
    "dense csa": {"compress_ratio": 4, "dense": True},
}


def config_of(**changes: Any) -> CSAConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "head_dim": 24,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": 6,
        # Enough that no entry has every product negative: equal scores are in no promised order.
        "index_n_heads": 12,
        "index_head_dim": 16,
        "index_topk": 3,
        "yarn": Yarn(factor=8.0, original_max_position_embeddings=64),
    }
    return CSAConfig(**{**sizes, **changes})


def small_layer(
    kind: str, *, tp_size: int = 1, dtype: torch.dtype = torch.float32, **changes: Any
) -> CompressedSparseAttention:
    """A layer of a kind; ``changes`` are of its config."""
    config = config_of(**{**KINDS[kind], **changes})
    layer = CompressedSparseAttention(config, tp_size=tp_size)
    generator = torch.Generator().manual_seed(0)
    for name, weight in layer.named_parameters():
        deviation = weight.shape[-1] ** -0.5 if name.endswith("proj.weight") else 1.0
        offset = 1.0 if name.endswith("norm.weight") else 0.0
        drawn = torch.randn(weight.shape, generator=generator) * deviation + offset
        weight.data = drawn.to(dtype)
    return layer
