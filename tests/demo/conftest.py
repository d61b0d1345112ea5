"""A small model, trained once on the real text for all of the demo's tests."""

from __future__ import annotations

import pytest

from csa_dispatch import Kind
from csa_dispatch.demo.capture import capture
from csa_dispatch.demo.corpus import load_corpus
from csa_dispatch.demo.model import ModelConfig
from csa_dispatch.demo.train import TrainConfig, train

SMALL = ModelConfig(
    layers=(Kind.WINDOW, Kind.GATHER, Kind.DENSE),
    d_model=24,
    heads=2,
    head_dim=8,
    rope_dim=4,
    query_rank=12,
    output_groups=2,
    output_rank=8,
    feed_forward=32,
    window=4,
    csa_ratio=4,
    hca_ratio=8,
    top_k=2,
    index_heads=2,
    index_dim=8,
)


@pytest.fixture(scope="session")
def small():
    return SMALL


@pytest.fixture(scope="session")
def brief():
    """Twenty steps of the small model: seconds."""
    return TrainConfig(
        steps=20, batch=4, tokens=48, held_out_spans=16, evaluations=4, warm_up=2, model=SMALL
    )


@pytest.fixture(scope="session")
def corpus():
    return load_corpus()


@pytest.fixture(scope="session")
def trained(brief, corpus):
    return train(brief, corpus)


@pytest.fixture(scope="session")
def layers(trained):
    return capture(trained.model, trained.held_out[:1])
