"""Hugging Face's DeepSeek-V4: the same configs, frequencies, layers and checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from csa_dispatch.nn import CompressedSparseAttention, from_deepseek_v4, layer_tensors, load_layer
from csa_dispatch.nn.rope import rope_frequencies

FLASH = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    # One more than there are layers, for multi-token prediction.
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}
PRO = {
    **FLASH,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}


@pytest.mark.parametrize(("published", "heads"), [(FLASH, 64), (PRO, 128)], ids=["Flash", "Pro"])
def test_the_published_configs_give_every_layer(published, heads):
    layers = from_deepseek_v4(published)
    assert len(layers) == published["num_hidden_layers"]
    for config, ratio in zip(layers, published["compress_ratios"], strict=False):
        assert config.num_attention_heads == heads
        assert config.compress_ratio == ratio
        assert config.has_indexer == (ratio == 4)
        assert config.theta == (160000 if ratio else 10000)
        for name in ("hidden_size", "q_lora_rank", "o_groups", "index_topk", "head_dim"):
            assert getattr(config, name) == published[name]
    with torch.device("meta"):
        modules = [CompressedSparseAttention(config) for config in layers]
    assert modules[2].sinks.shape == (heads,)
    assert modules[2].q_b_proj.weight.shape == (heads * 512, published["q_lora_rank"])


@pytest.mark.parametrize("published", [FLASH, PRO], ids=["Flash", "Pro"])
def test_transformers_config_gives_the_same_layers_and_frequencies(published):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    config = transformers.DeepseekV4Config(**published)
    expected = from_deepseek_v4(published)
    for form in (config, config.to_dict()):
        for found, wanted in zip(from_deepseek_v4(form), expected, strict=True):
            assert found.has_indexer == wanted.has_indexer
            changes = {"indexer_ratios": wanted.indexer_ratios}
            assert vars(found) | changes == vars(wanted)
    rotary = DeepseekV4RotaryEmbedding(config)
    for layer, kind in ((expected[2], "compress"), (expected[0], "main")):
        if layer.has_compressor == (kind == "compress"):
            theirs = getattr(rotary, f"{kind}_inv_freq")
            torch.testing.assert_close(rope_frequencies(layer), theirs, rtol=1e-6, atol=0)


def test_what_is_no_v4_config_is_named():
    with pytest.raises(TypeError, match="config is a str"):
        from_deepseek_v4("config.json")
    with pytest.raises(ValueError, match="compress_ratios is of 2 layers; it must be of at least"):
        from_deepseek_v4({**FLASH, "compress_ratios": [0, 4]})
    with pytest.raises(ValueError, match="config has no factor"):
        from_deepseek_v4({**FLASH, "rope_scaling": {"type": "yarn"}})
    with pytest.raises(ValueError, match="config has no main"):
        from_deepseek_v4({**FLASH, "rope_parameters": {"compress": {"rope_theta": 1e4}}})
    with pytest.raises(ValueError, match="config has no compress_ratios"):
        from_deepseek_v4({**FLASH, "compress_ratios": None})
    with pytest.raises(ValueError, match="rope type is 'longrope'"):
        from_deepseek_v4({**FLASH, "rope_scaling": {"type": "longrope"}})
    with pytest.raises(ValueError, match=r"attention_factor is 1\.3"):
        from_deepseek_v4(
            {**FLASH, "rope_scaling": {**FLASH["rope_scaling"], "attention_factor": 1.3}}
        )
    with pytest.raises(ValueError, match="layer_types is given with 'full_attention'"):
        from_deepseek_v4({**FLASH, "layer_types": ["full_attention"] * 43, "compress_rates": {}})


@pytest.fixture
def model():
    pytest.importorskip("transformers", minversion="5.24")
    from tests.integrations.small_v4 import small_v4

    return small_v4()


def layers_of(model):
    """Our layers with the weights of a transformers model."""
    tensors = model.state_dict()
    for number, config in enumerate(from_deepseek_v4(model.config)):
        layer = CompressedSparseAttention(config)
        load_layer(layer, tensors, number)
        yield number, layer


def test_output_and_gradients_are_transformers(model):
    x = torch.randn(2, 45, 64, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(45)[None]
    rotations = {
        kind: model.model.rotary_emb(x, positions, layer_type=kind)
        for kind in ("main", "compress")
    }
    token = torch.arange(45)
    distance = token[:, None] - token
    hidden = (distance < 0) | (distance >= model.config.sliding_window)
    mask = torch.zeros(2, 1, 45, 45).masked_fill(hidden, float("-inf"))
    for number, layer in layers_of(model):
        theirs = model.model.layers[number].self_attn
        results = []
        for run in (lambda x, theirs=theirs: theirs(x, rotations, positions, mask)[0], layer):
            leaf = x.clone().requires_grad_()
            output = run(leaf)
            output.square().sum().backward()
            results.append((output, leaf.grad))
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        ours = dict(layer.named_parameters())
        for name, weight in theirs.named_parameters():
            if weight.grad is not None:
                scale = weight.grad.abs().max().item()
                torch.testing.assert_close(
                    ours[name].grad, weight.grad, rtol=1e-4, atol=1e-4 * scale
                )


@pytest.mark.parametrize("published", [False, True], ids=["transformers", "published"])
def test_a_layers_tensors_pass_through_a_checkpoint(model, tmp_path: Path, published):
    safetensors = pytest.importorskip("safetensors.torch")
    written = {}
    for number, layer in layers_of(model):
        written |= layer_tensors(layer, number, published=published)
    safetensors.save_file(written, tmp_path / "layers.safetensors")
    read = safetensors.load_file(tmp_path / "layers.safetensors")
    assert f"layers.1.{'attn.indexer.wq_b' if published else 'self_attn.kv_proj'}.weight" in {
        name.removeprefix("model.") for name in read
    }
    if not published:
        assert set(read) == {name for name in model.state_dict() if ".self_attn." in name}
    for number, layer in layers_of(model):
        again = CompressedSparseAttention(layer.config)
        load_layer(again, read, number)
        for name, value in layer.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name


def test_what_transformers_saved_is_read(model, tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    model.save_pretrained(tmp_path)
    read = safetensors.load_file(tmp_path / "model.safetensors")
    configs = from_deepseek_v4(json.loads((tmp_path / "config.json").read_text()))
    for number, layer in layers_of(model):
        assert configs[number] == layer.config
        again = CompressedSparseAttention(configs[number])
        load_layer(again, read, number)
        for name, value in layer.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name


def test_a_checkpoint_that_does_not_fit_loads_nothing(model):
    _, layer = list(layers_of(model))[1]
    tensors = layer_tensors(layer, 1)
    own = "model.layers.1.self_attn."
    faulty = {
        **tensors,
        f"{own}kv_proj.weight": tensors[f"{own}kv_proj.weight"][:-1],
        f"{own}o_b_proj.weight": tensors[f"{own}o_b_proj.weight"].to(torch.float8_e4m3fn),
        f"{own}q_a_norm.weight": tensors[f"{own}q_a_norm.weight"].to("meta"),
        f"{own}q_a_proj.weight": tensors[f"{own}q_a_proj.weight"].numpy(),
        "layers.1.attn.wq_b.scale": torch.ones(1),
        "layers.11.attn.wq_b.scale": torch.ones(1),
        "layers.1.ffn.w1.weight": torch.ones(1),
    }
    del faulty[f"{own}sinks"]
    again = CompressedSparseAttention(layer.config)
    before = {name: value.clone() for name, value in again.state_dict().items()}
    with pytest.raises(ValueError, match="none was loaded") as raised:
        load_layer(again, faulty, 1)
    first, *lines, remedy = str(raised.value).split("\n")
    assert first.startswith("tensors do not fit the layer as its number 1")
    assert [line.strip() for line in lines] == [
        f"missing: {own}sinks (layers.1.attn.attn_sink)",
        f"{own}q_a_proj.weight is a ndarray; it must be a torch.Tensor",
        f"{own}q_a_norm.weight is on the meta device; it must have values",
        f"{own}kv_proj.weight is of shape [31, 64]; it must be of [32, 64]",
        f"{own}o_b_proj.weight is torch.float8_e4m3fn; it must be float16 or wider",
        "unexpected: layers.1.attn.wq_b.scale",
    ]
    for advice in ("every file", "Dequantise", "from_deepseek_v4", "Read it first"):
        assert remedy.count(advice) == 1
    for name, value in again.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_layers_of_another_kind_are_named(model):
    (_, window), (_, csa), *_ = layers_of(model)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.1\..*compressor\.indexer"):
        load_layer(CompressedSparseAttention(window.config), layer_tensors(csa, 1), 1)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\..*compressor\.kv_proj"):
        load_layer(CompressedSparseAttention(csa.config), layer_tensors(window, 0), 0)
    with pytest.raises(ValueError, match="sinks of the layer is on the meta device"):
        load_layer(
            CompressedSparseAttention(csa.config, device=torch.device("meta")),
            layer_tensors(csa, 1),
            1,
        )
    for published in (False, True):  # a dense layer has no use for the indexer
        dense = CompressedSparseAttention(dataclasses.replace(csa.config, dense=True))
        load_layer(dense, layer_tensors(csa, 1, published=published), 1)
        assert torch.equal(dense.kv_proj.weight, csa.kv_proj.weight)


def test_shards_are_cut_from_tensors_of_the_whole_shape(model):
    _, layer = next(layers_of(model))
    tensors = layer_tensors(layer, 0)
    shard = CompressedSparseAttention(layer.config, tp_size=2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"tp_rank is {rank}"):
            load_layer(shard, tensors, 0, tp_rank=rank)
    name = "model.layers.0.self_attn.o_b_proj.weight"
    with pytest.raises(ValueError, match=r"o_b_proj\.weight is of shape \[8\]"):
        load_layer(shard, {**tensors, name: torch.ones(8)}, 0, tp_rank=1)
    with pytest.raises(ValueError, match="layer is of tp_size 2"):
        layer_tensors(shard, 0)
