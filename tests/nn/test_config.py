"""Bad values of configs and arguments: refused by name, before a layer is made or changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from csa_dispatch.nn import (
    CompressedSparseAttention,
    CSAConfig,
    Yarn,
    from_deepseek_v4,
    layer_tensors,
    load_layer,
)
from tests.nn.small_layers import config_of, small_layer
from tests.nn.test_deepseek_v4 import FLASH

YARN = {"factor": 16.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, 10**400, "16", None, True])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "compress_rope_theta", "factor"])
def test_numbers_are_positive_and_finite(name: str, value: Any):
    change = {name: value}
    with pytest.raises((TypeError, ValueError), match=rf"^{name} is .*; it must be .*above 0.*\."):
        Yarn(**{**YARN, **change}) if name == "factor" else CSAConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": "no"}, "dense is 'no' .str.; it must be a bool. Pass True or False"),
        ({"dense": None}, "dense is None"),
        ({"yarn": {"factor": 2}}, "yarn is {'factor': 2} .dict.; it must be a Yarn or None"),
        ({"yarn": Yarn(**YARN), "compress_rope_theta": 1.0}, "compress_rope_theta is 1.0"),
        ({"compress_ratio": 10**12}, "compress_ratio is 1000000000000; it must be an int from 0"),
        ({"indexer_ratios": 4}, "indexer_ratios is 4 .int.; it must be a tuple"),
        ({"indexer_ratios": ("4",)}, r"indexer_ratios\[0\] is '4' .str.; it must be an int"),
        ({"hidden_size": 2.0}, "hidden_size is 2.0 .float.; it must be an int"),
        ({"head_dim": True}, "head_dim is True .bool.; it must be an int"),
    ],
)
def test_fields_of_a_config_are_named(change: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        CSAConfig(**change)


@pytest.mark.parametrize("value", [0, -1, 64.0, "64", None])
def test_the_context_of_pretraining_is_a_positive_int(value: Any):
    with pytest.raises((TypeError, ValueError), match="original_max_position_embeddings is"):
        Yarn(factor=2.0, original_max_position_embeddings=value)


ROPE = FLASH["rope_scaling"]
TYPES = {"layer_types": ["sliding_attention"] * 43, "compress_rates": {}}
NESTED = {"compress": {"rope_theta": 1e4}, "main": "x"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be an int of 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4' .str."),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4' .str.; it must be a number"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn' .str.; it must be a dict"),
        ({"rope_scaling": {**ROPE, "factor": "16"}}, "factor is '16' .str.; it must be a number"),
        ({"rope_scaling": {**ROPE, "beta_fast": 0}}, "beta_fast is 0; it must be above 0"),
        ({"rope_parameters": "compress"}, "rope_parameters is 'compress' .str."),
        ({"rope_parameters": NESTED}, r"rope_parameters\['main'\] is 'x' .str."),
        ({"compress_ratios": 4}, "compress_ratios is 4 .int.; it must be a list"),
        ({"compress_ratios": ["4"] * 43}, "compress_ratio is '4' .str."),
        ({**TYPES, "layer_types": 4}, "layer_types is 4 .int.; it must be a list"),
        ({**TYPES, "layer_types": [[]] * 43}, r"layer_types is given with \[\]"),
        ({**TYPES, "compress_rates": 4}, "compress_rates is 4 .int.; it must be a dict"),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'"),
    ],
)
def test_fields_of_a_models_config_are_named(change: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        from_deepseek_v4({**FLASH, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {}}, "config is a dict; it must be a CSAConfig"),
        ({"tp_size": "2"}, "tp_size is '2' .str.; it must be an int"),
        ({"tp_size": 2.0}, "tp_size is 2.0 .float."),
        ({"tp_size": True}, "tp_size is True .bool."),
        ({"dtype": torch.int32}, "dtype is torch.int32 .dtype.; it must be float64, float32"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16' .str."),
    ],
)
def test_a_layers_own_arguments_are_named(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"config": config_of(), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        CompressedSparseAttention(arguments.pop("config"), **arguments)


def test_what_is_no_layer_of_a_checkpoint_is_named():
    layer: Any = small_layer("csa")
    other: Any = torch.nn.Linear(2, 2)
    nothing: Any = None
    for call in (lambda: load_layer(other, {}, 1), lambda: layer_tensors(other, 1)):
        with pytest.raises(TypeError, match="layer is a Linear; it must be a CompressedSparse"):
            call()
    with pytest.raises(TypeError, match="tensors is None; it must be a mapping"):
        load_layer(layer, nothing, 1)
    for number in ("1", True, -1):
        with pytest.raises((TypeError, ValueError), match=f"number is {number!r}"):
            load_layer(layer, {}, number)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tp_rank is '0' \(str\)"):
        load_layer(layer, {}, 1, tp_rank="0")  # type: ignore[arg-type]
