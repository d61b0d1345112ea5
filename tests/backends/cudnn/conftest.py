"""cuDNN's functions by their documentation, in place of the kernels."""

from __future__ import annotations

import pytest
from csa_backend_cudnn import backward, forward
from csa_backend_cudnn.entry_points import EntryPoints

from tests.backends.cudnn.documented import Recorder


@pytest.fixture(params=["sm_90", "sm_100"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What the adapter calls instead of cuDNN, as on either kind of GPU, and a record of it."""
    recorder = Recorder(hopper=request.param == "sm_90")
    points = EntryPoints(recorder.forward, recorder.backward)
    for module in (forward, backward):
        monkeypatch.setattr(module, "entry_points", lambda: points)
    monkeypatch.setattr(backward, "walks_lengths", lambda query: recorder.hopper)
    return recorder
