"""FA4's entry points by their documentation, in place of the kernels."""

from __future__ import annotations

import pytest
from csa_backend_fa4 import backward, forward
from csa_backend_fa4.entry_points import EntryPoints

from tests.backends.fa4.documented import Recorder


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What the adapter calls instead of flash-attn-4, and a record of the calls."""
    recorder = Recorder()
    points = EntryPoints(recorder.forward, recorder.backward)
    for module in (forward, backward):
        monkeypatch.setattr(module, "entry_points", lambda: points)
    return recorder
