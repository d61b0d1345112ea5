"""DeepSeek-V4 models: their layers' configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
