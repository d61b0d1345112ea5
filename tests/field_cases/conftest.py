"""Field cases run on every backend that is installed and runs on this machine's CPU."""

from __future__ import annotations

import pytest

import csa_dispatch

BACKENDS = [
    row.name
    for row in csa_dispatch.backends().values()
    if row.backend is not None
    and row.available
    and "cpu" in row.backend.forward_capabilities.device_type
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of one installed backend."""
    return request.param
