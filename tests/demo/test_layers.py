"""The V4 layer kinds in small: against loops written from their definitions, and causal."""

from __future__ import annotations

import math

import pytest
import torch

from csa_dispatch.demo.capture import capture
from csa_dispatch.demo.layers import (
    THETA_COMPRESSED,
    Compressor,
    Indexer,
    LayerSizes,
    entry_attention,
    index_loss,
    pick,
    rotate,
)
from csa_dispatch.demo.model import ByteModel, ModelConfig

SIZES = LayerSizes(24, 2, 8, 4, 12, 4, ratio=4, top_k=2, index_heads=2, index_dim=8)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def model(small: ModelConfig):
    made = ByteModel(small)
    with torch.no_grad():  # at its start the head is small and the biases are zero
        for weight in made.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return made


def test_rotation_turns_each_pair_by_its_own_angle_and_back():
    x = torch.randn(2, 5, 8)
    positions = torch.tensor([0, 1, 2, 10, 100])
    found = rotate(x, positions, 100.0, 4)
    assert torch.equal(found[..., :4], x[..., :4])
    for pair, speed in ((4, 1.0), (6, 100.0**-0.5)):
        angle = positions * speed
        even = x[..., pair] * angle.cos() - x[..., pair + 1] * angle.sin()
        odd = x[..., pair] * angle.sin() + x[..., pair + 1] * angle.cos()
        torch.testing.assert_close(found[..., pair], even)
        torch.testing.assert_close(found[..., pair + 1], odd)
    torch.testing.assert_close(rotate(found, positions, 100.0, 4, sign=-1), x)


@pytest.mark.parametrize("overlapping", [False, True])
def test_entries_are_the_gated_pool_of_their_blocks(overlapping):
    dim, ratio = 6, 4
    compressor = Compressor(10, dim, ratio, 2, overlapping=overlapping)
    torch.nn.init.normal_(compressor.bias)
    x = torch.randn(1, 14, 10)
    found = compressor(x)[0]
    assert found.shape == (3, dim)  # the trailing two tokens give no entry
    values, gates = compressor.values(x)[0], compressor.gates(x)[0]
    for block in range(3):
        own = range(block * ratio, (block + 1) * ratio)
        branch = slice(dim, None) if overlapping else slice(0, dim)
        slots = [(token, branch) for token in own]
        if overlapping and block > 0:
            slots += [(token - ratio, slice(0, dim)) for token in own]
        gate = torch.stack(
            [gates[token, part] + compressor.bias[token % ratio, part] for token, part in slots]
        )
        value = torch.stack([values[token, part] for token, part in slots])
        pooled = compressor.norm((gate.softmax(dim=0) * value).sum(dim=0))
        expected = rotate(pooled[None], torch.tensor([block * ratio]), THETA_COMPRESSED, 2)[0]
        torch.testing.assert_close(found[block], expected)


def test_index_scores_follow_the_formula_and_hide_the_future():
    indexer = Indexer(SIZES)
    x, residual = torch.randn(1, 12, 24), torch.randn(1, 12, 12)
    found = indexer(x, residual)[0]
    keys = indexer.keys(x)[0]
    query = indexer.queries(residual)[0].unflatten(-1, (2, 8))
    weights = indexer.weights(x)[0]
    for token in range(12):
        turned = rotate(query[token][:, None], torch.tensor([token]), THETA_COMPRESSED, 4)
        for entry in range(3):
            if entry >= (token + 1) // 4:
                assert found[token, entry] == -math.inf
                continue
            heads = torch.relu(turned[:, 0] @ keys[entry]) * weights[token]
            torch.testing.assert_close(found[token, entry], heads.sum() * (2 * 8) ** -0.5)


def test_picks_are_the_best_entries_and_minus_one_where_there_are_fewer():
    scores = torch.tensor([[[-math.inf] * 3, [1.0, -math.inf, -math.inf], [1.0, 3.0, 2.0]]])
    found = pick(scores, 2)
    assert found.dtype == torch.int32
    assert found.tolist() == [[[-1, -1], [0, -1], [1, 2]]]


def test_no_byte_changes_a_prediction_before_it(model):
    text = torch.randint(256, (1, 40))
    logits = model(text)[0]
    for changed in (0, 7, 8, 15, 23, 39):
        other = text.clone()
        other[0, changed] = (other[0, changed] + 1) % 256
        difference = (model(other)[0] - logits).abs().amax(dim=-1)[0]
        assert torch.all(difference[:changed] == 0), changed
        assert difference[changed] > 0


def test_index_loss_is_the_divergence_from_the_attention_and_zero_at_it(model):
    layer = capture(model, torch.randint(256, (2, 33)))[1]
    target = entry_attention(layer.call, layer.lse)
    hidden = torch.arange(8) >= ((torch.arange(32) + 1) // 4)[:, None]
    assert index_loss(target.masked_fill(hidden, -math.inf), layer.call, layer.lse, 4) < 1e-6
    uniform = torch.zeros_like(target).masked_fill(hidden, -math.inf)
    expected = []
    for row in range(3, 32):
        entries = (row + 1) // 4
        share = target[:, row, :entries].softmax(dim=-1)
        expected.append((share * (share * entries).log()).sum(dim=-1))
    found = index_loss(uniform, layer.call, layer.lse, 4)
    torch.testing.assert_close(found, torch.stack(expected).mean())


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
