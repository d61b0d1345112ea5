"""A small matrix, and backends that are registered for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from csa_dispatch import Backend, register_backend, unregister_backend
from csa_dispatch.parity.matrix import Matrix, parse_matrix

TINY = {
    "name": "tiny",
    "summary": "a few small calls",
    "group": [
        {
            "name": "some",
            "source": "list",
            "layouts": ["BHSD", "THD"],
            "base": {"heads": 3, "head_dim": 16, "tokens": 6, "pool": 5, "slots": 4, "window": 3},
            "cases": [
                {"kind": "gather", "content": "messy"},
                {"kind": "window", "dtype": "bfloat16"},
                {"kind": "dense-compressed", "needs_grad": "", "compress_ratio": 2},
            ],
        },
    ],
}


@pytest.fixture
def tiny() -> Matrix:
    """Three cases: gather with all gradients, window in bf16, dense without gradients."""
    return parse_matrix(TINY, "tiny.toml")


@pytest.fixture
def register() -> Iterator[Callable[[Backend], str]]:
    """Registers a backend until the end of the test and returns its name."""
    names: list[str] = []

    def add(backend: Backend) -> str:
        register_backend(backend)
        names.append(backend.name)
        return backend.name

    yield add
    for name in names:
        unregister_backend(name)
