"""Small DeepSeek-V4 models of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def small_v4(layer_types: list[str] = KINDS, seed: int = 0, **changes: Any) -> Any:
    """A ``DeepseekV4ForCausalLM`` in eval mode; ``changes`` are of its config."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "o_groups": 2,
        "o_lora_rank": 16,
        # Enough that no entry has every product negative: of equal scores transformers picks any.
        "index_n_heads": 12,
        "index_head_dim": 16,
        "index_topk": 3,
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "initializer_range": 0.2,
        "eos_token_id": None,
    }
    config = transformers.DeepseekV4Config(
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=["moe"] * len(layer_types),
        **{**sizes, **changes},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.DeepseekV4ForCausalLM(config)
        # Zeros would hide a bias or sink that is dropped.
        for name, weight in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                torch.nn.init.normal_(weight)
    return model.eval()
