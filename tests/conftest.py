"""Fixtures that leave the process's registry, settings and census as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import csa_dispatch
from csa_dispatch import Backend


@pytest.fixture
def registered() -> Iterator[Callable[[Backend], Backend]]:
    """Register backends for one test."""
    names: list[str] = []

    def register(backend: Backend) -> Backend:
        csa_dispatch.register_backend(backend)
        names.append(backend.name)
        return backend

    yield register
    for name in names:
        if name in csa_dispatch.backends():
            csa_dispatch.unregister_backend(name)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Set CSA_DISPATCH_* variables for one test."""

    def change(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        csa_dispatch.reload_settings()

    yield change
    monkeypatch.undo()
    csa_dispatch.reload_settings()
