"""Fixtures of the integrations' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Builds a small transformers model: ``make_model(layer_types=..., **config)``."""
    from tests.integrations.small_v4 import small_v4

    return small_v4


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Random token ids ``[B, T]``."""

    def draw(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, 97, (batch, length), generator=generator)

    return draw
