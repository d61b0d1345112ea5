"""A DeepSeek-V4 model of transformers gives the same through ``attention()``."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from csa_dispatch import BackendRefused, CallSpec, Receipt, record_receipts, use_backend
from csa_dispatch.integrations.transformers import disable, enable
from csa_dispatch.integrations.transformers.model import model_forward

transformers = pytest.importorskip("transformers", minversion="5.24")

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
ALONE = [([kind], 41) for kind in KINDS]
# fp32 rounding of sums in another order, through a few layers.
TIGHT = {"rtol": 2e-4, "atol": 2e-4}


def calls_of(receipts: list[Receipt]) -> list[Receipt]:
    """The receipts of ``attention()`` alone."""
    return [receipt for receipt in receipts if isinstance(receipt.spec, CallSpec)]


def losses(model, ids):
    """Loss and every parameter's gradient, by name."""
    model.zero_grad(set_to_none=True)
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.loss.detach(), {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize(("kinds", "length"), [(KINDS, 3), (KINDS, 64), *ALONE], ids=str)
def test_logits_loss_and_gradients_are_the_plain_models(make_model, tokens, kinds, length):
    model = make_model(kinds)
    ids = tokens(2, length)
    logits = model(ids).logits
    loss, gradients = losses(model, ids)
    enable(model)
    torch.testing.assert_close(model(ids).logits, logits, **TIGHT)
    enabled_loss, enabled_gradients = losses(model, ids)
    torch.testing.assert_close(enabled_loss, loss, **TIGHT)
    # Without any entry the plain model leaves the compressor's gradients out; here they are 0.
    assert enabled_gradients.keys() >= gradients.keys()
    for name, found in enabled_gradients.items():
        assert "indexer" not in name
        gradient = gradients.get(name, torch.zeros_like(found))
        bound = 1e-3 * gradient.abs().max().item() + 1e-7
        torch.testing.assert_close(
            found, gradient, rtol=1e-3, atol=bound, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize(("kinds", "length"), [(KINDS, 1), (KINDS, 6), *ALONE], ids=str)
def test_greedy_generation_is_the_plain_models(make_model, tokens, kinds, length):
    model = make_model(kinds)
    ids = tokens(3, length)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    plain = model.generate(ids, **settings)
    with record_receipts() as receipts:
        found = enable(model).generate(ids, **settings)
    assert len(calls_of(receipts)) == 20 * len(kinds)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), **TIGHT)
    assert torch.equal(found.sequences, plain.sequences)


@pytest.mark.parametrize("chunks", [(1,) * 25, (5, 1, 1, 2, 8, 3, 25), (20, 25)], ids=str)
def test_any_chunking_with_a_cache_gives_the_full_forward(make_model, tokens, chunks):
    model = enable(make_model())
    ids = tokens(2, sum(chunks))
    full = model(ids).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = []
    for chunk in ids.split(list(chunks), dim=1):
        parts.append(model(chunk, cache=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, **TIGHT)


def test_a_cache_begun_plain_is_continued_enabled_and_the_other_way(make_model, tokens):
    model = make_model()
    ids = tokens(2, 46)
    full = model(ids).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = []
    for number, chunk in enumerate(ids.split([13, 6, 9, 10, 8], dim=1)):
        (disable if number % 2 else enable)(model)
        parts.append(model(chunk, cache=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, **TIGHT)


def test_beam_search_reorders_the_cache(make_model, tokens):
    model, ids = make_model(), tokens(2, 11)
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    plain = model.generate(ids, **settings)
    assert torch.equal(enable(model).generate(ids, **settings), plain)


@pytest.mark.parametrize("backend", ["eager", "attention_gym"])
def test_a_forced_backend_runs_every_layer(make_model, tokens, backend):
    model, ids = make_model(), tokens(1, 40)
    logits = model(ids).logits
    enable(model)
    with use_backend(backend), record_receipts() as receipts:
        output = model(ids, labels=ids)
        output.loss.backward()
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    assert [receipt.backend for receipt in calls_of(receipts)] == [backend] * 6


def test_bf16_is_as_near_to_fp32_as_the_plain_model(make_model, tokens):
    exact, ids = make_model(), tokens(2, 48)
    low = copy.deepcopy(exact).to(torch.bfloat16)
    exact = exact(ids).logits

    def error(model: nn.Module) -> float:
        return (model(ids).logits.float() - exact).norm().item()

    plain = error(low)
    assert plain > 0
    assert error(enable(low)) < 2 * plain


def test_enable_is_idempotent_and_disable_restores(make_model, tokens):
    model, ids = make_model(), tokens(1, 24)
    before = {name: dict(part.__dict__) for name, part in model.named_modules()}
    plain = model(ids).logits
    assert enable(enable(model)) is model
    with record_receipts() as receipts:
        model(ids)
    assert len(calls_of(receipts)) == 3
    assert disable(disable(model)) is model
    with record_receipts() as receipts:
        assert torch.equal(model(ids).logits, plain)
    assert not calls_of(receipts)
    after = {name: dict(part.__dict__) for name, part in model.named_modules()}
    assert {name: sorted(found) for name, found in after.items()} == {
        name: sorted(found) for name, found in before.items()
    }


def test_a_copy_of_an_enabled_model_is_enabled_by_itself(make_model, tokens):
    model, ids = enable(make_model()), tokens(1, 24)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with record_receipts() as receipts:
        logits = copied(ids).logits
    assert len(calls_of(receipts)) == 3
    assert logits.abs().max() > 0
    disable(copied)
    assert model.model.__dict__["forward"].func is model_forward


def test_an_enabled_model_can_be_pickled(make_model, tokens):
    model, ids = enable(make_model()), tokens(1, 24)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    with record_receipts() as receipts:
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert len(calls_of(receipts)) == 6
    disable(found)
    assert "forward" not in found.model.__dict__


def test_a_forward_that_a_library_wrapped_and_keeps_aside_is_replaced_inside(make_model, tokens):
    model, ids = make_model(), tokens(1, 24)
    plain, calls = model(ids).logits, []
    layer = model.model.layers[1].self_attn
    layer._old_forward = layer.forward
    layer.forward = lambda *args, **kwargs: calls.append(1) or layer._old_forward(*args, **kwargs)
    for change in (enable, disable):
        change(model)
        with record_receipts() as receipts:
            torch.testing.assert_close(model(ids).logits, plain, **TIGHT)
        assert len(calls_of(receipts)) == (3 if change is enable else 0)
    assert len(calls) == 2


def test_checkpointed_training_gives_the_same_gradients(make_model, tokens):
    model, ids = enable(make_model()), tokens(2, 33)
    _, gradients = losses(model, ids)
    model.activation_checkpointing_enable()
    _, found = losses(model.train(), ids)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, **TIGHT)


def test_padding_behind_the_tokens_changes_no_token(make_model, tokens):
    model, ids = enable(make_model()), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 23:] = 0
    padded = ids.masked_fill(mask == 0, 0)
    found = model(padded, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[:1], model(ids[:1]).logits, **TIGHT)
    torch.testing.assert_close(found[1:, :23], model(ids[1:, :23]).logits, **TIGHT)


def packed_rows(model, ids):
    model(ids, position_ids=torch.arange(ids.shape[1])[None].expand(2, -1) % 7)


def skipping(model, ids):
    model(ids[:1], position_ids=2 * torch.arange(ids.shape[1])[None])


def dense_mask(model, ids):
    model(ids, attention_mask=torch.zeros(2, 1, ids.shape[1], ids.shape[1]))


def another_cache(model, ids):
    model(ids, cache=transformers.DynamicCache())


def masked(model, ids, columns, **arguments):
    mask = torch.ones_like(ids)
    mask[1, columns] = 0
    model(ids, attention_mask=mask, **arguments)


def padded_within(model, ids):
    masked(model, ids, slice(3, 5))


def padded_behind_with_a_cache(model, ids):
    masked(model, ids, slice(8, None), cache=transformers.DynamicCache(config=model.config))


def padded_later(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    model(ids, cache=cache)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :2] = 0
    model(ids[:, :1], attention_mask=mask, cache=cache)


def mask_of_shape(*shape):
    return lambda model, ids: model(ids, attention_mask=torch.ones(shape, dtype=torch.long))


def mask_of_new_tokens_alone(model, ids):
    cache = model(ids).cache
    model(ids[:, :3], attention_mask=torch.ones_like(ids[:, :3]), cache=cache)


def inputs(name, *shape):
    return lambda model, ids: model(**{name: ids.new_zeros(shape)})


def positions_of_fewer_tokens(model, ids):
    model(ids, position_ids=torch.arange(ids.shape[1] - 1)[None])


REFUSED = {
    mask_of_shape(1, 12): "attention_mask is of shape [1, 12]; needs [2, 12], a row for each",
    mask_of_shape(3, 12): "attention_mask is of shape [3, 12]; needs [2, 12]",
    mask_of_shape(2, 11): "attention_mask is of shape [2, 11]; needs [2, 12]",
    mask_of_shape(2, 13): "attention_mask is of shape [2, 13]; needs [2, 12]",
    mask_of_new_tokens_alone: "a column for each of 12 cached and 3 new tokens",
    inputs("input_ids", 2, 0): "input_ids is of shape [2, 0]; needs [B, T] of positive sizes",
    inputs("input_ids", 0, 12): "input_ids is of shape [0, 12]",
    inputs("input_ids", 12): "a single row as a batch of one",
    inputs("inputs_embeds", 2, 0, 64): "inputs_embeds is of shape [2, 0, 64]",
    positions_of_fewer_tokens: "position_ids is of shape [1, 11]",
    packed_rows: "position_ids is other than consecutive",
    skipping: "position_ids is other than consecutive",
    dense_mask: "leave attention_mask out",
    another_cache: "DynamicCache(config=model.config)",
    padded_within: "padding within or behind",
    padded_behind_with_a_cache: "padding within or behind",
    padded_later: "other padding than before",
    lambda model, ids: model(ids, output_attentions=True): "No attention weights are formed",
}


@pytest.mark.parametrize(("call", "words"), REFUSED.items())
def test_what_the_layers_cannot_honour_is_refused_with_a_reason(make_model, tokens, call, words):
    model = enable(make_model())
    with pytest.raises(BackendRefused) as refused:
        call(model, tokens(2, 12))
    assert words in str(refused.value)
    ((reason,),) = refused.value.reasons.values()
    assert reason.remedy


@pytest.mark.parametrize("kind", ["static", "without layers"])
def test_window_layers_refuse_caches_that_are_not_their_own(make_model, tokens, kind):
    model = enable(make_model(layer_types=["sliding_attention"] * 2))
    cache = transformers.DynamicCache()
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(BackendRefused, match=r"Pass DynamicCache\(config=model.config\)"):
        model(tokens(2, 12), cache=cache)


def test_dropout_is_refused_in_training(make_model, tokens):
    model = enable(make_model(attention_dropout=0.1))
    model(tokens(1, 9))
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1"):
        model.train()(tokens(1, 9))


def test_a_dense_mask_is_refused_by_a_layer_called_alone(make_model):
    model = enable(make_model())
    x = torch.randn(1, 6, 64)
    positions = torch.arange(6)[None]
    rotations = {
        kind: model.model.rotary_emb(x, positions, layer_type=kind)
        for kind in ("main", "compress")
    }
    for block in model.model.layers:
        assert block.self_attn(x, rotations, positions, None)[0].shape == x.shape
        with pytest.raises(ValueError, match="attention_mask is given"):
            block.self_attn(x, rotations, positions, torch.zeros(1, 1, 6, 6))


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="model is a Linear"):
        enable(nn.Linear(2, 2))


@pytest.mark.parametrize("change", [enable, disable])
@pytest.mark.parametrize("model", [None, nn.Linear, "a/name"], ids=str)
def test_what_is_no_module_is_refused(change, model):
    with pytest.raises(TypeError, match=r"model is .*; it must be a torch\.nn\.Module\. Pass"):
        change(model)


def test_documents_packed_by_position_ids_are_documents_alone(make_model, tokens):
    model, ids = enable(make_model()), tokens(1, 48)
    parts = ids.split([17, 1, 30], dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    found = model(ids, position_ids=positions).logits
    alone = [model(part).logits for part in parts]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), **TIGHT)
    gradients = torch.autograd.grad(found.square().sum(), model.lm_head.weight)
    expected = torch.autograd.grad(torch.cat(alone, 1).square().sum(), model.lm_head.weight)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-2)
