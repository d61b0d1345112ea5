"""DeepSeek-V4 models: their layers' configs, and a layer's tensors in their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .attention import CompressedSparseAttention
from .config import CSAConfig, Yarn

_SAME_NAMES = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "rms_norm_eps",
)
_SPARSE = "compressed_sparse_attention"

_PUBLISHED = {
    "q_a_proj.": "wq_a.",
    "q_a_norm.": "q_norm.",
    "q_b_proj.": "wq_b.",
    "kv_proj.": "wkv.",
    "kv_norm.": "kv_norm.",
    "o_a_proj.": "wo_a.",
    "o_b_proj.": "wo_b.",
    "sinks": "attn_sink",
    "compressor.kv_proj.": "compressor.wkv.",
    "compressor.gate_proj.": "compressor.wgate.",
    "compressor.position_bias": "compressor.ape",
    "compressor.kv_norm.": "compressor.norm.",
    "compressor.indexer.kv_proj.": "indexer.compressor.wkv.",
    "compressor.indexer.gate_proj.": "indexer.compressor.wgate.",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
    "compressor.indexer.kv_norm.": "indexer.compressor.norm.",
    "compressor.indexer.q_b_proj.": "indexer.wq_b.",
    "compressor.indexer.scorer.weights_proj.": "indexer.weights_proj.",
}
"""Our names, which are transformers' own, and those of the published checkpoints."""

_SHARDED = {"q_b_proj.weight": 0, "sinks": 0, "o_a_proj.weight": 0, "o_b_proj.weight": 1}
"""The dimension along which tensor-parallel ranks share a tensor."""


def from_deepseek_v4(config: Any) -> list[CSAConfig]:
    """One ``CSAConfig`` for each layer of a DeepSeek-V4 model.

    Args:
        config: a Hugging Face ``DeepseekV4Config``, or the dict of a ``config.json`` in its form
            or in the published one (``compress_ratios``, ``rope_scaling``).

    Raises:
        TypeError: config is neither.
        ValueError: a field is missing, or is of a kind V4 does not have.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        raise TypeError(
            f"config is a {type(config).__name__}; it must be a DeepseekV4Config or the dict of "
            "its config.json."
        )
    fields = config if isinstance(config, Mapping) else vars(config)
    shared: dict[str, Any] = {name: _field(fields, name) for name in _SAME_NAMES}
    shared |= {"qk_rope_head_dim": _rope_dim(fields), **_rope(fields)}
    return [CSAConfig(**shared, **kind) for kind in _kinds(fields)]


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"config has no {name}; it must be a DeepSeek-V4 config.")
    return fields[name]


def _kinds(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each layer's ``compress_ratio`` and ``indexer_ratios``."""
    count = _field(fields, "num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        # Ratios of multi-token-prediction layers may follow.
        ratios = _of_every_layer("compress_ratios", _field(fields, "compress_ratios"), count)
        return [{"compress_ratio": ratio, "indexer_ratios": (4,)} for ratio in ratios]
    rates = {"sliding_attention": 0, **_field(fields, "compress_rates")}
    unknown = sorted(set(types) - set(rates))
    if unknown:
        raise ValueError(f"layer_types holds {unknown}; it must hold {', '.join(rates)}.")
    return [
        {
            "compress_ratio": rates[kind],
            "indexer_ratios": (rates[kind],) if kind == _SPARSE else (),
        }
        for kind in _of_every_layer("layer_types", types, count)
    ]


def _of_every_layer(name: str, values: list[Any], count: int) -> list[Any]:
    if len(values) < count:
        raise ValueError(f"{name} is of {len(values)} layers; it must be of at least {count}.")
    return values[:count]


def _rope_dim(fields: Mapping[str, Any]) -> int:
    if fields.get("qk_rope_head_dim") is not None:
        return fields["qk_rope_head_dim"]
    return int(_field(fields, "head_dim") * _field(fields, "partial_rotary_factor"))


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``compress_rope_theta`` and ``yarn``."""
    nested = fields.get("rope_parameters") or {}
    if "compress" in nested:
        stretch = nested["compress"]
        main = _field(_field(nested, "main"), "rope_theta")
        compress = _field(stretch, "rope_theta")
    else:
        main, compress = _field(fields, "rope_theta"), _field(fields, "compress_rope_theta")
        stretch = nested or fields.get("rope_scaling") or {}
    kind = stretch.get("rope_type", stretch.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"the rope type is {kind!r}; it must be 'default' or 'yarn'.")
    if stretch.get("attention_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"attention_factor is {stretch['attention_factor']}; it must be 1: V4 scales neither "
            "cosine nor sine."
        )
    yarn = None
    if kind == "yarn":
        yarn = Yarn(
            _field(stretch, "factor"),
            _field(stretch, "original_max_position_embeddings"),
            stretch.get("beta_fast") or 32.0,
            stretch.get("beta_slow") or 1.0,
        )
    return {"rope_theta": main, "compress_rope_theta": compress, "yarn": yarn}


def load_layer(
    layer: CompressedSparseAttention,
    tensors: Mapping[str, Tensor],
    number: int,
    *,
    tp_rank: int = 0,
) -> None:
    """Copy the attention tensors of one layer of a checkpoint into ``layer``.

    Args:
        layer: of the config that ``from_deepseek_v4`` gives for it.
        tensors: by name, transformers' (``model.layers.3.self_attn.kv_proj.weight``) or the
            published checkpoints' (``layers.3.attn.wkv.weight``), with or without the prefix
            ``model.``; others are ignored.
        number: of the layer in the model.
        tp_rank: which share of the heads this layer holds, with ``tp_size`` above 1.

    Raises:
        KeyError: a tensor is missing.
        ValueError: a tensor has another shape or is quantised, or there is no such tp_rank.
    """
    if not 0 <= tp_rank < layer.tp_size:
        raise ValueError(
            f"tp_rank is {tp_rank}; it must be 0 to {layer.tp_size - 1}, of the layer's tp_size "
            f"{layer.tp_size}."
        )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            tensor = _find(tensors, name, number)
            if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
                raise ValueError(
                    f"{name} of layer {number} is {tensor.dtype}; it must be float16 or wider. "
                    "Dequantise the checkpoint first."
                )
            if name in _SHARDED:
                tensor = tensor.chunk(layer.tp_size, dim=_SHARDED[name])[tp_rank]
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"{name} of layer {number} is of shape {list(tensor.shape)}; it must be of "
                    f"{list(parameter.shape)}, as the layer's config says."
                )
            parameter.copy_(tensor)


def layer_tensors(
    layer: CompressedSparseAttention, number: int, *, published: bool = False
) -> dict[str, Tensor]:
    """The tensors of ``layer`` by the names of a checkpoint: the reverse of ``load_layer``.

    Args:
        layer: a whole one, of tp_size 1.
        number: of the layer in the model.
        published: the published checkpoints' names instead of transformers'.
    """
    if layer.tp_size != 1:
        raise ValueError(f"layer is of tp_size {layer.tp_size}; it must be whole, of tp_size 1.")
    form = _published if published else _own
    return {form(name, number): tensor for name, tensor in layer.state_dict().items()}


def _find(tensors: Mapping[str, Tensor], name: str, number: int) -> Tensor:
    published = _published(name, number)
    # transformers saves the published names below its own prefix, and the KV norm as "norm".
    saved = published.replace(".attn.kv_norm.", ".attn.norm.")
    for candidate in (_own(name, number), f"model.{published}", f"model.{saved}"):
        for form in (candidate, candidate.removeprefix("model.")):
            if form in tensors:
                return tensors[form]
    raise KeyError(f"the checkpoint has neither {_own(name, number)} nor {published}")


def _own(name: str, number: int) -> str:
    return f"model.layers.{number}.self_attn.{name}"


def _published(name: str, number: int) -> str:
    ours = max((key for key in _PUBLISHED if name.startswith(key)), key=len)
    return f"layers.{number}.attn.{_PUBLISHED[ours]}{name.removeprefix(ours)}"
