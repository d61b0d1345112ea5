"""Field cases run on every backend that trains with gathered entries on this machine's CPU."""

from __future__ import annotations

import pytest

import csa_dispatch
from csa_dispatch import Backend, CallSpec

SMALL = CallSpec(dtype="float32", heads=4, tokens=8, head_dim=16, pool=6, slots=3, window=4)
GRADIENTS = SMALL._replace(needs_grad=(True, True, True, True))


def _runs_gathers(backend: Backend) -> bool:
    """Whether forward and backward of a small gathering call run here."""
    backward = backend.backward_capabilities
    return (
        not backend.forward_capabilities.reasons(SMALL)
        and backward is not None
        and not backward.reasons(GRADIENTS)
    )


BACKENDS = [
    row.name
    for row in csa_dispatch.backends().values()
    if row.backend is not None and row.available and _runs_gathers(row.backend)
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of one such backend."""
    return request.param
