"""Whether flash-attn-4 is here, and new enough, is found out without importing it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from csa_backend_fa4 import entry_points
from csa_backend_fa4.entry_points import BACKWARD, FORWARD, REQUIRED, availability

import csa_dispatch
from csa_dispatch import CallSpec
from tests.backends.fa4.documented import Recorder

NEW_IN_B32 = {"recompute_p", "token_chunk", "gather_bwd_recompute_p"}
NEW_IN_B33 = {"o_lo"}


def source(*without: str) -> str:
    """An interface module whose entry points lack some parameters."""
    functions = (
        f"def {name}({', '.join(sorted(parameters - set(without)))}, **other): pass"
        for name, parameters in REQUIRED.items()
    )
    return "import nothing_that_is_installed\n" + "\n".join(functions)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretend that this text is flash-attn-4's interface and that its dependencies are here."""

    def install(text: str) -> None:
        path = tmp_path / "flash_attn" / "cute" / "interface.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(entry_points, "interface_source", lambda: path)
        monkeypatch.setattr(entry_points, "DEPENDENCIES", {"torch": "torch"})

    return install


def test_the_floor_is_available(installed):
    installed(source())
    assert availability().reason is None


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (NEW_IN_B33, f"{BACKWARD}(o_lo=)"),  # 4.0.0b32
        (NEW_IN_B32 | NEW_IN_B33, f"{FORWARD}(gather_bwd_recompute_p=)"),  # 4.0.0b31
    ],
)
def test_an_older_version_is_refused_by_what_it_lacks(installed, without, missing):
    installed(source(*without))
    reason = availability().reason
    assert reason is not None
    assert missing in reason.actual
    assert "4.0.0b33" in reason.required
    assert reason.remedy == "pip install 'csa-dispatch[fa4]'"


def test_the_stand_in_takes_exactly_what_is_probed_for():
    for function, name in ((Recorder.forward, FORWARD), (Recorder.backward, BACKWARD)):
        assert set(inspect.signature(function).parameters) - {"self"} == REQUIRED[name]


def test_a_package_without_the_entry_points_is_refused(installed):
    installed("x = 1\n")
    reason = availability().reason
    assert reason is not None
    assert f"{FORWARD}()" in reason.actual
    assert f"{BACKWARD}()" in reason.actual


def test_a_broken_package_is_a_reason_not_an_error(installed):
    installed("def broken(:\n")
    reason = availability().reason
    assert reason is not None
    assert reason.actual.startswith("broken (SyntaxError")


def test_missing_dependencies_are_named(installed, monkeypatch: pytest.MonkeyPatch):
    installed(source())
    monkeypatch.setattr(entry_points, "DEPENDENCIES", {"torch": "torch", "no_such": "no-such"})
    reason = availability().reason
    assert reason is not None
    assert reason.actual == "no-such not installed"


def test_absence_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(entry_points, "interface_source", lambda: None)
    reason = availability().reason
    assert reason is not None
    assert reason.actual == "flash-attn-4 not installed"


def test_importing_and_probing_load_neither_flash_attn_nor_triton():
    code = """
import sys, json, torch
before = set(sys.modules)
from csa_backend_fa4 import backend
backend.probe()
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded & {"flash_attn", "triton", "cutlass", "quack", "tvm_ffi"})))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("device", ["sm_100", "sm_103"])
def test_blackwell_runs_it_and_says_what_it_copies(device: str):
    decision = csa_dispatch.explain(
        CallSpec(needs_grad=(True,) * 4, documents="cu_seqlens"), device=device, backend="fa4"
    )
    assert (decision.forward, decision.backward) == ("fa4", "fa4")
    notes = " ".join(decision.notes)
    assert "640 int32 slots a token" in notes
    assert "one table of 5120 rows" in notes
    assert "upstream gradient" in notes


def test_determinism_is_refused_for_the_backward_alone():
    spec = CallSpec(needs_grad=(True,) * 4, deterministic=True)
    refused = csa_dispatch.explain(spec, device="sm_100", backend="fa4")
    assert refused.forward is None
    (reason,) = refused.refused()["fa4"]
    assert reason.field == "deterministic"
    beside = csa_dispatch.explain(spec, device="sm_100", backend="fa4", backward_backend="triton")
    assert (beside.forward, beside.backward) == ("fa4", "triton")
