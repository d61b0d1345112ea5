"""DeepSeek-V4 models: their layers' configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..validation import fail
from ..wording import a_kind, quoted, told
from .checks import check_int, check_positive
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
        TypeError: config is neither, or a field is of another type.
        ValueError: a field is missing, out of bounds, or of a kind V4 does not have.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        required = "a DeepseekV4Config or the dict of its config.json"
        remedy = "Read the file with json.load."
        fail("config", a_kind(config), required, remedy, TypeError)
    fields = config if isinstance(config, Mapping) else vars(config)
    shared: dict[str, Any] = {name: _field(fields, name) for name in _SAME_NAMES}
    shared |= {"qk_rope_head_dim": _rope_dim(fields), **_rope(fields)}
    return [CSAConfig(**shared, **kind) for kind in _kinds(fields)]


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"config has no {name}; it must be a DeepSeek-V4 config. Pass all of it.")
    return fields[name]


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        fail(name, told(value), "a dict", "Pass it as config.json has it.", TypeError)
    return value


def _kinds(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each layer's ``compress_ratio`` and ``indexer_ratios``."""
    count = _field(fields, "num_hidden_layers")
    check_int("num_hidden_layers", count, 1)
    types = fields.get("layer_types")
    if types is None:
        # Ratios of multi-token-prediction layers may follow.
        ratios = _of_every_layer("compress_ratios", _field(fields, "compress_ratios"), count)
        return [{"compress_ratio": ratio, "indexer_ratios": (4,)} for ratio in ratios]
    types = _of_every_layer("layer_types", types, count)
    compress_rates = _mapping("compress_rates", _field(fields, "compress_rates"))
    rates = {"sliding_attention": 0, **compress_rates}
    for kind in types:
        if not isinstance(kind, str) or kind not in rates:
            remedy = "Give compress_rates the rate of others."
            fail("layer_types", f"given with {kind!r}", f"of {', '.join(rates)}", remedy)
    return [
        {
            "compress_ratio": rates[kind],
            "indexer_ratios": (rates[kind],) if kind == _SPARSE else (),
        }
        for kind in types
    ]


def _of_every_layer(name: str, values: Any, count: int) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        fail(name, told(values), "a list", "Give it an item a layer.", TypeError)
    if len(values) < count:
        required = f"of at least {count}, num_hidden_layers"
        fail(name, f"of {len(values)} layers", required, "Change one of the two.")
    return values[:count]


def _rope_dim(fields: Mapping[str, Any]) -> int:
    if fields.get("qk_rope_head_dim") is not None:
        return fields["qk_rope_head_dim"]
    head_dim, share = _field(fields, "head_dim"), _field(fields, "partial_rotary_factor")
    check_int("head_dim", head_dim, 1)
    check_positive("partial_rotary_factor", share)
    return int(head_dim * share)


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``compress_rope_theta`` and ``yarn``."""
    nested = _mapping("rope_parameters", fields.get("rope_parameters") or {})
    if "compress" in nested:
        stretch = _mapping("rope_parameters['compress']", nested["compress"])
        main = _mapping("rope_parameters['main']", _field(nested, "main"))
        main = _field(main, "rope_theta")
        compress = _field(stretch, "rope_theta")
    else:
        main, compress = _field(fields, "rope_theta"), _field(fields, "compress_rope_theta")
        stretch = nested or _mapping("rope_scaling", fields.get("rope_scaling") or {})
    kind = stretch.get("rope_type", stretch.get("type", "default"))
    if kind not in ("default", "yarn"):
        fail("the rope type", quoted(kind), "'default' or 'yarn'", "V4 has no other.")
    if stretch.get("attention_factor") not in (None, 1, 1.0):
        remedy = "V4 scales neither cosine nor sine: leave it out."
        fail("attention_factor", quoted(stretch["attention_factor"]), "1", remedy)
    yarn = None
    if kind == "yarn":
        names = ("beta_fast", "beta_slow")
        betas = {name: stretch[name] for name in names if stretch.get(name) is not None}
        needed = [_field(stretch, n) for n in ("factor", "original_max_position_embeddings")]
        yarn = Yarn(*needed, **betas)
    return {"rope_theta": main, "compress_rope_theta": compress, "yarn": yarn}
