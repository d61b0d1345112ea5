"""Training learns, measures honestly, repeats itself, and goes through attention()."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from csa_dispatch import BackendRefused, use_backend
from csa_dispatch.demo.train import TrainConfig, held_out_losses, train


def test_twenty_steps_lower_the_held_out_loss(trained):
    history = trained.history
    assert [item.step for item in history.held_out] == [0, 5, 10, 15, 20]
    assert history.held_out[-1].loss < history.held_out[0].loss - 0.5
    assert history.fell
    assert 7 < history.held_out[0].loss < 9  # knowing nothing costs eight bits a byte


def test_a_model_that_does_not_learn_has_not_fallen(brief, corpus):
    still = train(dataclasses.replace(brief, learning_rate=0.0, steps=2), corpus)
    assert not still.history.fell
    assert still.history.improvement == 0


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(brief, corpus):
    short = dataclasses.replace(brief, steps=3)
    torch.manual_seed(1)
    first = train(short, corpus)
    torch.manual_seed(2)
    second = train(short, corpus)
    assert first.history.steps == second.history.steps
    assert torch.equal(first.held_out, second.held_out)
    other = train(dataclasses.replace(short, seed=1), corpus)
    assert other.history.steps[0].loss != first.history.steps[0].loss


def test_training_leaves_the_global_random_state_alone(brief, corpus):
    before = torch.random.get_rng_state()
    train(dataclasses.replace(brief, steps=1), corpus)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_held_out_spans_do_not_depend_on_the_number_of_steps(trained, brief, corpus):
    shorter = train(dataclasses.replace(brief, steps=1), corpus)
    assert torch.equal(shorter.held_out, trained.held_out)


def test_the_held_out_loss_is_that_of_the_held_out_text(trained, brief, corpus):
    text = bytes(corpus.held_out.text.tolist())
    for span in trained.held_out[:4].tolist():
        assert bytes(span) in text
    found = held_out_losses(trained.model, trained.held_out, 5).mean()
    assert float(found) == pytest.approx(trained.history.held_out[-1].loss, rel=1e-5)


def test_every_kind_ran_forward_and_backward(trained, brief):
    counts = trained.history.ran
    backward = {kind: n for (direction, kind, _), n in counts.items() if direction == "backward"}
    assert backward == {"window": 20, "gather": 20, "dense-compressed": 20}
    forward = {kind for direction, kind, _ in counts if direction == "forward"}
    assert forward == set(backward)


def test_a_forced_backend_trains(brief, corpus):
    with use_backend("attention_gym"):
        found = train(dataclasses.replace(brief, steps=1), corpus)
    assert {backend for _, _, backend in found.history.ran} == {"attention_gym"}


def test_a_forced_backend_that_cannot_run_the_layers_is_an_error(brief, corpus):
    with use_backend("triton"), pytest.raises(BackendRefused, match="device_type"):
        train(brief, corpus)


def test_the_rate_warms_up_and_decays():
    config = TrainConfig(steps=100, warm_up=10, learning_rate=1.0)
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 < rates[-1] < 0.06
