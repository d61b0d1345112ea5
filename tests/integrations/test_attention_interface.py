"""``register_attention``: window-only layers under a name of transformers' AttentionInterface."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from csa_dispatch import record_receipts
from csa_dispatch.integrations.transformers import register_attention
from csa_dispatch.integrations.transformers.interface import window_attention

transformers = pytest.importorskip("transformers", minversion="5.24")

WINDOWS = ["sliding_attention"] * 2


@pytest.fixture(scope="module")
def name() -> str:
    return register_attention()


def test_window_layers_give_the_plain_logits_and_generation(make_model, tokens, name):
    model, ids = make_model(WINDOWS), tokens(2, 19)
    logits = model(ids).logits
    sequences = model.generate(ids, max_new_tokens=12, do_sample=False)
    model.set_attn_implementation(name)
    with record_receipts() as receipts:
        found = model(ids).logits
    assert len(receipts) == 2
    torch.testing.assert_close(found, logits, rtol=2e-4, atol=2e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), sequences)


def test_gradients_are_the_plain_models(make_model, tokens, name):
    model, ids = make_model(WINDOWS), tokens(2, 19)
    model(ids, labels=ids).loss.backward()
    plain = {key: weight.grad for key, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation(name)
    model(ids, labels=ids).loss.backward()
    for key, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, plain[key], rtol=1e-3, atol=1e-4)


def test_a_layer_with_a_compressor_is_sent_to_enable(make_model, tokens, name):
    model = make_model(["heavily_compressed_attention"])
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=r"Use enable\(model\)"):
        model(tokens(1, 9))


def test_padding_and_packing_are_refused(make_model, tokens, name):
    model, ids = make_model(WINDOWS), tokens(2, 9)
    model.set_attn_implementation(name)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="attention_mask is padded"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="packed position_ids"):
        model(ids, position_ids=torch.arange(9)[None] % 4, use_cache=False)


def test_masks_of_another_shape_are_refused_and_a_cached_tokens_one_taken(
    make_model, tokens, name
):
    model, ids = make_model(WINDOWS), tokens(2, 9)
    full = model(ids).logits
    model.set_attn_implementation(name)
    for shape in ((2, 8), (2, 10), (1, 9)):
        with pytest.raises(ValueError, match=r"attention_mask is .* be of shape \[2, 9\]"):
            model(ids, attention_mask=torch.ones(shape))
    cache = model(ids[:, :6], attention_mask=torch.ones(2, 6)).cache
    found = model(ids[:, 6:], attention_mask=torch.ones(2, 9), cache=cache).logits
    torch.testing.assert_close(found, full[:, 6:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("taken", ["sdpa", "eager", "flash_attention_2"])
def test_names_of_other_implementations_are_refused(taken):
    masks, functions = transformers.AttentionMaskInterface(), transformers.AttentionInterface()
    before = dict(masks), dict(functions)
    with pytest.raises(ValueError, match=f"name is '{taken}', which transformers' Attention"):
        register_attention(taken)
    assert (dict(masks), dict(functions)) == before


def test_a_name_is_a_string_and_ours_may_be_registered_again(name):
    with pytest.raises(TypeError, match=r"name is 3 \(int\); it must be a string"):
        register_attention(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="name is ''; it must be a name of one character"):
        register_attention("")
    assert register_attention(name) == name


def test_other_values_masks_dropout_and_no_window_are_refused():
    query, kv = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    module = nn.Module()
    for match, value, mask, changes in (
        ("value is another tensor", kv.clone(), None, {}),
        ("attention_mask is given", kv, torch.zeros(1, 1, 5, 5), {}),
        ("dropout is 0.5", kv, None, {"dropout": 0.5}),
        ("sliding_window is None", kv, None, {"sliding_window": None}),
    ):
        arguments = {"scaling": 1.0, "sliding_window": 3, **changes}
        with pytest.raises(ValueError, match=match):
            window_attention(module, query, kv, value, mask, **arguments)
