"""FlexAttention without dynamo: its own switch for debugging, which saves seconds a shape."""

from __future__ import annotations

import pytest
import torch.nn.attention.flex_attention as flex
from csa_backend_flex.masks import forget_masks


@pytest.fixture(autouse=True)
def fresh_masks():
    forget_masks()
    yield
    forget_masks()


@pytest.fixture
def without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
