"""What ``warmup`` refuses, before it starts a process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from csa_backend_triton import compiling, tile_table, warmup

from csa_dispatch import BackendRefused, CallSpec

H100 = CallSpec(capability=90, needs_grad=(True,) * 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": 70}, "capability is 70; needs at least 80"),
        ({"dtype": "float64"}, "dtype is float64; needs bfloat16"),
        ({"head_dim": 600}, "head_dim is 600; needs 1 to 576"),
    ],
    ids=str,
)
def test_specs_that_the_backend_does_not_claim_are_refused_with_its_reasons(changes, reason):
    with pytest.raises(BackendRefused, match=r"specs\[1\] is a call that triton") as refused:
        warmup([H100, H100._replace(**changes)])
    assert f"triton: {reason}" in str(refused.value)
    assert len(refused.value.reasons["triton"]) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((H100,), TypeError, r"specs is a CallSpec; .* a list of CallSpecs\. Put"),
        ((None,), TypeError, "specs is None; it must be a list"),
        ((["gather"],), TypeError, r"specs\[0\] is a str; it must be a CallSpec"),
        (([CallSpec()],), ValueError, r"specs\[0\]\.capability is None; .* Pass capability=90"),
        (([H100._replace(heads=0)],), ValueError, "heads is 0; it must be 1 or more"),
        (([H100], 0), ValueError, "workers is 0; it must be an int of 1 or more"),
    ],
)
def test_what_describes_no_calls_is_refused_by_name(arguments: Any, error, text):
    with pytest.raises(error, match=text):
        warmup(*arguments)


def keys_of_a_tile(spec: CallSpec) -> int:
    return tile_table.forward_tile(90, 128, 16, False).keys


def test_processes_have_the_tiles_that_were_loaded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiling, "device_capability", lambda device: 90)
    monkeypatch.setattr(compiling, "_count", keys_of_a_tile)
    monkeypatch.setitem(tile_table.FORWARD["hopper"][128], 16, (32, 4, 2))
    assert warmup([H100], workers=1) == 32


def test_the_gpu_is_here_and_of_the_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="found no CUDA device; it must run on a machine"):
        warmup([H100])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiling, "device_capability", lambda device: 80)
    with pytest.raises(ValueError, match=r"specs\[0\]\.capability is 90; .* this GPU's, 80"):
        warmup([H100])


def test_a_script_without_a_main_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from csa_backend_triton import compiling\n"
        "from csa_dispatch import CallSpec\n"
        "compiling._check_device = lambda specs: None\n"
        "compiling.warmup([CallSpec(capability=90)], workers=1)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "call warmup() under if __name__ == '__main__':" in run.stderr.splitlines()[-1]
