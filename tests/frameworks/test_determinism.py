"""Determinism: repeatable or refused, warned about under warn_only, the same in any batch slot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import csa_dispatch
from csa_dispatch import BackendRefused, Capabilities, attention
from tests.core.probes import WindowBackend, inputs

BACKENDS = ["eager", "attention_gym"]


@pytest.fixture
def deterministic() -> Iterator[Any]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def run(backend: str, **sizes: Any) -> list[Tensor]:
    made = inputs(grad=True, **sizes)
    output = attention(*made, sliding_window_size=5, backend=backend)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = [tensor.grad for tensor in made if tensor.grad is not None]
    return [output.detach(), *gradients]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_runs_are_bitwise_equal(backend: str, deterministic: Any) -> None:
    deterministic(True)
    sizes = {"heads": 16, "tokens": 33, "pool": 40, "slots": 20, "head_dim": 64, "batch": 3}
    first = run(backend, **sizes)
    for _ in range(9):
        for got, wanted in zip(run(backend, **sizes), first, strict=True):
            assert torch.equal(got, wanted)


def test_warn_only_warns_and_runs(registered: Any, deterministic: Any) -> None:
    registered(WindowBackend("racy", Capabilities(deterministic=csa_dispatch.FALSE)))
    made = inputs(grad=True)
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match="racy's forward is not deterministic"):
        output = attention(made.query, made.local_kv, sliding_window_size=3, backend="racy")
    with pytest.warns(UserWarning, match="racy's backward is not deterministic"):
        output.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*made, sliding_window_size=3, backend="eager").sum().backward()
    deterministic(True)
    with pytest.raises(BackendRefused, match="deterministic is True"):
        attention(made.query, made.local_kv, backend="racy")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_row_equals_the_same_row_alone(backend: str) -> None:
    made = inputs(heads=16, tokens=33, pool=40, slots=20, head_dim=64, batch=3)
    whole = attention(*made, sliding_window_size=5, backend=backend)
    for row in range(3):
        alone = [tensor[row : row + 1] for tensor in made[:4]]
        output = attention(*alone, made.attention_sink, sliding_window_size=5, backend=backend)
        torch.testing.assert_close(whole[row : row + 1], output, rtol=1e-6, atol=1e-6)
