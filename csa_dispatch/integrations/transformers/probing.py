"""What of transformers we build on, looked for by name before anything is changed."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

NEEDED = "5.24"
ATTENTION = (
    "q_a_proj",
    "q_a_norm",
    "q_b_proj",
    "q_b_norm",
    "kv_proj",
    "kv_norm",
    "o_a_proj",
    "o_b_proj",
    "sinks",
    "compressor",
    "head_dim",
    "layer_idx",
    "rope_layer_type",
    "scaling",
    "sliding_window",
    "attention_dropout",
)
POOLING = (
    "kv_proj",
    "gate_proj",
    "position_bias",
    "kv_norm",
    "rotary_emb",
    "rope_layer_type",
    "compress_rate",
    "head_dim",
)
INDEXER = (*POOLING, "q_b_proj", "index_topk", "scorer")
SCORER = ("weights_proj", "weights_scaling", "softmax_scale")
CACHE = ("store_compression_weights", "update_compressor_states")


def v4_modeling() -> ModuleType:
    """transformers' module of the V4 model.

    Raises:
        ImportError: transformers is absent, too old, or changed beyond what we know.
    """
    try:
        # By name: the type checker need not have it installed.
        version = import_module("transformers").__version__
    except ImportError as error:
        raise ImportError(
            "transformers is not installed; install csa-dispatch[transformers]"
        ) from error
    try:
        modeling = import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    except ImportError as error:
        raise ImportError(
            f"transformers {version} has no DeepSeek-V4 model; install transformers>={NEEDED}"
        ) from error
    names = ("DeepseekV4Attention", "DeepseekV4Model", "apply_rotary_pos_emb")
    missing = [name for name in names if not hasattr(modeling, name)]
    for name in ("DeepseekV4HCACache", "DeepseekV4CSACache"):
        layer = getattr(modeling, name, None)
        missing += [f"{name}.{method}" for method in CACHE if not hasattr(layer, method)]
    for name in names[:2]:
        forward = getattr(getattr(modeling, name, None), "forward", None)
        if forward is not None and "cache" not in inspect.signature(forward).parameters:
            missing.append(f"{name}.forward's argument cache")
    _refuse(missing, version)
    return modeling


def check_layer(layer: nn.Module) -> None:
    """Raise ImportError when an attention layer lacks a part that we read."""
    missing = _missing(layer, ATTENTION, "self_attn")
    compressor = getattr(layer, "compressor", None)
    if compressor is not None:
        missing += _missing(compressor, POOLING, "compressor")
        indexer = getattr(compressor, "indexer", None)
        if indexer is not None:
            missing += _missing(indexer, INDEXER, "indexer")
            missing += _missing(getattr(indexer, "scorer", None), SCORER, "scorer")
    _refuse(missing, import_module("transformers").__version__)


def _missing(owner: Any, names: tuple[str, ...], label: str) -> list[str]:
    return [f"{label}.{name}" for name in names if not hasattr(owner, name)]


def _refuse(missing: list[str], version: str) -> None:
    if missing:
        raise ImportError(
            f"transformers {version} lacks {', '.join(missing)}; "
            f"csa_dispatch.integrations.transformers needs transformers>={NEEDED} with these"
        )
