"""The indexers' picks: measured right, and better for having been taught."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from csa_dispatch import Kind
from csa_dispatch.demo.model import ModelConfig
from csa_dispatch.demo.picks import entry_attention, indexer_weights, measure_picks, recall_of
from csa_dispatch.demo.train import TrainConfig, train


@pytest.fixture(scope="module")
def layer(layers):
    return layers[1]


def picked(layer, sign: int):
    """The layer's call with the best (1) or the worst (-1) picks there are."""
    drawn = sign * entry_attention(layer.call, layer.lse)
    tokens, entries = drawn.shape[1:]
    hidden = torch.arange(entries) >= ((torch.arange(tokens) + 1) // layer.ratio)[:, None]
    best = drawn.masked_fill(hidden, -torch.inf).topk(2, dim=-1)
    picks = torch.where(best.values > -torch.inf, best.indices, -1).to(torch.int32)
    return layer.call._replace(kv_indices=picks)


def test_recall_is_one_for_the_best_picks_and_low_for_the_worst(layer):
    assert recall_of(picked(layer, 1), layer.lse, layer.ratio)[0] == 1
    recall, chance = recall_of(picked(layer, -1), layer.lse, layer.ratio)
    assert recall < chance < 1


def test_random_picks_reach_what_chance_says(layer):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        picks = torch.stack(
            [
                torch.randperm(max(2, (t + 1) // layer.ratio), generator=generator)[:2]
                for t in range(layer.call.query.shape[2])
            ]
        )
        call = layer.call._replace(kv_indices=picks[None])
        recall, chance = recall_of(call, layer.lse, layer.ratio)
        found.append(recall)
    assert sum(found) / len(found) == pytest.approx(chance, abs=0.02)


def test_what_is_shown_are_the_picks_of_the_last_token(trained, layer):
    initial = indexer_weights(trained.model)
    found = measure_picks(trained.model, initial, trained.held_out[:1], 20)
    assert found is not None
    assert list(found.shown) == sorted(layer.call.kv_indices[0, -1].tolist())
    drawn = entry_attention(layer.call, layer.lse)[0, -1]
    assert list(found.wanted) == sorted(drawn.topk(2).indices.tolist())
    assert found.entries == 12
    assert found.recall == found.unlearned


def test_lending_the_first_indexers_leaves_the_model_as_it_was(trained):
    before = {name: weight.clone() for name, weight in trained.model.state_dict().items()}
    other = {name: -weight for name, weight in indexer_weights(trained.model).items()}
    found = measure_picks(trained.model, other, trained.held_out, 20)
    assert found is not None
    assert found.recall != found.unlearned
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_nothing_is_measured_where_no_token_has_to_choose(trained):
    initial = indexer_weights(trained.model)
    assert measure_picks(trained.model, initial, trained.held_out[:, :9], 0) is None


MODEL = ModelConfig(
    layers=(Kind.WINDOW, Kind.GATHER),
    d_model=48,
    heads=4,
    head_dim=16,
    rope_dim=8,
    query_rank=24,
    output_rank=16,
    feed_forward=96,
    window=8,
    top_k=6,
    index_heads=8,
    index_dim=16,
)


def test_the_loss_makes_recall_rise_and_without_it_nothing_does(corpus):
    config = TrainConfig(
        steps=40, batch=4, tokens=128, held_out_spans=8, evaluations=2, warm_up=5, model=MODEL
    )
    taught = train(config, corpus).history.picks
    left = train(dataclasses.replace(config, teach_indexers=False), corpus).history.picks
    assert [item.step for item in taught] == [0, 20, 40]
    assert taught[0].recall == left[0].recall
    assert taught[-1].recall > taught[0].recall + 0.1
    assert taught[-1].recall > left[-1].recall + 0.1
    assert taught[-1].recall > taught[-1].unlearned + 0.1
    assert left[-1].recall == left[-1].unlearned
