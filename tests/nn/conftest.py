"""Fixtures of the layer's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from csa_dispatch.nn import CompressedSparseAttention
from tests.nn.small_layers import small_layer


@pytest.fixture
def make_layer() -> Callable[..., CompressedSparseAttention]:
    """Builds a layer: ``make_layer("csa", tp_size=..., dtype=..., **config)``."""
    return small_layer


@pytest.fixture
def hidden() -> Callable[..., torch.Tensor]:
    """Hidden states ``[B, T, 32]``."""

    def draw(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, tokens, 32, generator=generator).to(dtype)

    return draw
