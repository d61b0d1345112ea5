"""A batch padded on the left: every row is what it is alone, which transformers itself misses."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch.integrations.transformers import enable

transformers = pytest.importorskip("transformers", minversion="5.24")

PADDING = (5, 0, 11)
TIGHT = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture
def prompts(tokens):
    """Padded token ids ``[3, 21]``, their mask, and each row alone."""
    ids = tokens(3, 21)
    mask = torch.ones_like(ids)
    for row, rows in enumerate(PADDING):
        mask[row, :rows] = 0
    ids = ids * mask
    return ids, mask, [ids[row : row + 1, rows:] for row, rows in enumerate(PADDING)]


def test_logits_and_gradients_are_those_of_the_rows_alone(make_model, prompts):
    model = enable(make_model())
    ids, mask, rows = prompts
    found = model(ids, attention_mask=mask, use_cache=False).logits
    gradients = torch.autograd.grad(found[mask.bool()].square().sum(), model.lm_head.weight)
    alone = [model(row).logits[0] for row in rows]
    for row, rows_of_padding in enumerate(PADDING):
        torch.testing.assert_close(found[row, rows_of_padding:], alone[row], **TIGHT)
    expected = torch.autograd.grad(torch.cat(alone).square().sum(), model.lm_head.weight)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 2}, {"prefill_chunk_size": 8}, {"use_cache": False}],
    ids=str,
)
def test_generation_is_that_of_the_rows_alone(make_model, prompts, settings):
    model = enable(make_model())
    ids, mask, rows = prompts
    settings = {"max_new_tokens": 14, "do_sample": False, **settings}
    found = model.generate(ids, attention_mask=mask, **settings)
    settings.pop("prefill_chunk_size", None)
    for row, tokens in enumerate(rows):
        alone = model.generate(tokens, **settings)
        assert torch.equal(found[row, 21:], alone[0, tokens.shape[1] :])


def test_positions_may_be_given_or_left_out(make_model, prompts):
    model = enable(make_model())
    ids, mask, _ = prompts
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    given = model(ids, attention_mask=mask, position_ids=positions).logits
    left_out = model(ids, attention_mask=mask).logits
    assert torch.equal(given, left_out)


def test_the_models_own_cache_goes_on_without_a_mask(make_model, prompts, tokens):
    model = enable(make_model())
    ids, mask, rows = prompts
    more = tokens(3, 6, seed=1)
    with torch.no_grad():
        first = model(ids, attention_mask=mask)
        found = model(more, cache=first.cache).logits
        assert first.cache.get_seq_length() == 27
        for row, prompt in enumerate(rows):
            alone = model(torch.cat((prompt, more[row : row + 1]), dim=1)).logits
            torch.testing.assert_close(found[row], alone[0, -6:], **TIGHT)
        first.cache.reset()
        assert first.cache.get_seq_length() == 0


def test_a_mask_of_cached_and_new_tokens_is_the_one_to_pass_on(make_model, prompts, tokens):
    model = enable(make_model())
    ids, mask, _ = prompts
    more = tokens(3, 6, seed=1)
    whole = torch.cat((mask, torch.ones_like(more)), dim=1)
    with torch.no_grad():
        full = model(torch.cat((ids, more), dim=1), attention_mask=whole).logits
        cache = model(ids, attention_mask=mask).cache
        found = model(more, attention_mask=whole, cache=cache).logits
    torch.testing.assert_close(found, full[:, -6:], **TIGHT)


def test_transformers_itself_lets_padding_change_a_rows_tokens(make_model, prompts):
    model = make_model()
    ids, mask, rows = prompts
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    assert (padded[0, 5:] - model(rows[0]).logits[0]).abs().max() > 0.1
