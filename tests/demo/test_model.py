"""The model of V4's layers: causal, and each weight taught by what is meant to teach it."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch.demo.model import ByteModel, ModelConfig


@pytest.fixture
def model(small: ModelConfig):
    torch.manual_seed(0)
    made = ByteModel(small)
    with torch.no_grad():  # at its start the head is small and the biases are zero
        for weight in made.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return made


def test_no_byte_changes_a_prediction_before_it(model):
    text = torch.randint(256, (1, 40))
    logits = model(text)[0]
    for changed in (0, 7, 8, 15, 23, 39):
        other = text.clone()
        other[0, changed] = (other[0, changed] + 1) % 256
        difference = (model(other)[0] - logits).abs().amax(dim=-1)[0]
        assert torch.all(difference[:changed] == 0), changed
        assert difference[changed] > 0


def test_the_index_loss_trains_the_indexer_alone(model):
    model(torch.randint(256, (1, 32)))[1].backward()
    touched = {
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and weight.grad.abs().sum() > 0
    }
    assert touched
    assert all(".indexer." in name for name in touched)


def test_every_weight_but_the_indexers_learns_from_the_prediction(model):
    model(torch.randint(256, (1, 40)))[0].square().sum().backward()
    for name, weight in model.named_parameters():
        if ".indexer." in name:
            assert weight.grad is None, name
        else:
            assert weight.grad is not None, name
            assert weight.grad.abs().sum() > 0, name


def test_the_index_loss_can_be_left_out(model):
    text = torch.randint(256, (2, 32))
    logits, loss = model(text)
    without, none = model(text, index_loss=False)
    assert torch.equal(logits, without)
    assert loss > 0
    assert none == 0
