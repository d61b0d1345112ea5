"""Whether cuDNN's frontend is here, and new enough, is found out without importing it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from csa_backend_cudnn import backend, entry_points
from csa_backend_cudnn.entry_points import (
    BACKWARD,
    FILES,
    FORWARD,
    REQUIRED,
    SCORES,
    TOP_K,
    availability,
)

import csa_dispatch
from csa_dispatch import CallSpec, load_policy, use_policy
from csa_dispatch.testing import Boundary, boundaries_for
from tests.backends.cudnn import documented_indexer
from tests.backends.cudnn.documented import Recorder

TRAINING = CallSpec(needs_grad=(True,) * 4)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretend that functions with these parameters are cuDNN's and its dependencies are here."""

    def install(parameters: dict[str, frozenset[str]], text: str = "{}") -> None:
        for name, wanted in parameters.items():
            path = tmp_path / FILES[name]
            path.parent.mkdir(parents=True)
            path.write_text(text.format(f"def {name}({', '.join(sorted(wanted))}): pass\n"))
        monkeypatch.setattr(entry_points, "package_root", lambda: tmp_path)
        monkeypatch.setattr(entry_points, "DEPENDENCIES", {"torch": "torch"})

    return install


def reason():
    found = availability().reason
    assert found is not None
    return found


def test_what_the_adapter_calls_is_enough(installed):
    installed(REQUIRED)
    assert availability().reason is None


def test_an_older_version_is_refused_by_what_it_lacks(installed):
    older = REQUIRED[BACKWARD] - {"q_cluster_mode"}
    installed({FORWARD: REQUIRED[FORWARD], BACKWARD: older})
    assert f"{BACKWARD}(q_cluster_mode=)" in reason().actual
    assert reason().required == "1.32 or newer"


def test_a_version_without_a_sparse_forward_is_refused(installed):
    installed({BACKWARD: REQUIRED[BACKWARD]})
    assert f"{FORWARD}()" in reason().actual


def test_a_broken_package_is_a_reason_not_an_error(installed):
    installed(REQUIRED, text="def broken(:\n")
    assert reason().actual.startswith("broken (SyntaxError")


def test_missing_dependencies_are_named(installed, monkeypatch: pytest.MonkeyPatch):
    installed(REQUIRED)
    missing = {"no_such.thing": "no-such", "torch": "torch"}
    monkeypatch.setattr(entry_points, "DEPENDENCIES", missing)
    assert reason().actual == "no-such not installed"


def test_absence_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(entry_points, "package_root", lambda: None)
    found = backend.probe().reason
    assert found is not None
    assert found.actual == "nvidia-cudnn-frontend not installed"
    assert found.remedy == "pip install 'csa-dispatch[cudnn]'"


def test_the_stand_in_takes_what_is_probed_for():
    stand_ins = {
        FORWARD: Recorder.forward,
        BACKWARD: Recorder.backward,
        SCORES: documented_indexer.scores,
        TOP_K: documented_indexer.top_k,
    }
    assert set(stand_ins) == set(REQUIRED)
    for name, function in stand_ins.items():
        assert set(inspect.signature(function).parameters) >= REQUIRED[name]


def test_importing_and_probing_load_neither_cudnn_nor_cutlass():
    code = """
import sys, json, torch
before = set(sys.modules)
from csa_backend_cudnn import backend
backend.probe()
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded & {"cudnn", "cutlass", "tvm_ffi"})))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_on_hopper_it_is_a_backward_for_another_forward():
    alone = csa_dispatch.explain(TRAINING, device="sm_90", backend="cudnn")
    assert alone.forward is None
    assert [item.field for item in alone.refused()["cudnn"]] == ["capability"]
    beside = csa_dispatch.explain(
        TRAINING, device="sm_90", backend="triton", backward_backend="cudnn"
    )
    assert (beside.forward, beside.backward) == ("triton", "cudnn")
    assert any("640 int32 slots a token" in note for note in beside.notes)


def test_a_policy_can_pair_it_with_our_forward(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text('[[rule]]\nprefer = ["triton+cudnn", "triton", "eager"]\n')
    with use_policy(load_policy(path)):
        taken = csa_dispatch.explain(TRAINING, device="sm_90")
        other = csa_dispatch.explain(TRAINING._replace(head_dim=128), device="sm_90")
    assert (taken.forward, taken.backward) == ("triton", "cudnn")
    assert (other.forward, other.backward) == ("triton", "triton")
    (reason,) = other.refused()["triton+cudnn"]
    assert reason.field == "head_dim"


@pytest.mark.parametrize("device", ["sm_100", "sm_103"])
def test_on_blackwell_it_runs_both_directions_and_determinism(device: str):
    for spec in (TRAINING, TRAINING._replace(deterministic=True)):
        decision = csa_dispatch.explain(spec, device=device, backend="cudnn")
        assert (decision.forward, decision.backward) == ("cudnn", "cudnn")


@pytest.mark.parametrize(
    ("device", "change", "field"),
    [
        ("sm_90", {"deterministic": True}, "deterministic"),
        ("sm_90", {"heads": 1}, "heads"),
        ("sm_90", {"head_dim": 576}, "head_dim"),
        ("sm_90", {"tokens": 2**17}, "addresses_fit"),
        ("sm_90", {"kv_heads": 2}, "kv_heads"),
        ("sm_100", {"heads": 96}, "heads"),
        ("sm_120", {}, "capability"),
        ("sm_80", {}, "capability"),
    ],
)
def test_what_its_backward_cannot_do_has_a_reason(device: str, change: dict, field: str):
    spec = TRAINING._replace(**change)
    decision = csa_dispatch.explain(spec, device=device, backend="eager", backward_backend="cudnn")
    reasons = decision.refused()["eager+cudnn"]
    assert field in [reason.field for reason in reasons]
    assert all(reason.remedy for reason in reasons)


BOUNDARIES = [
    boundary
    for capability in (90, 100)
    for boundary in boundaries_for(
        backend.forward_capabilities if capability == 100 else backend.backward_capabilities,
        backend.backward_capabilities,
        device_type="cuda",
        capability=capability,
    )
]


@pytest.mark.parametrize(
    "boundary", BOUNDARIES, ids=lambda item: f"{item.field}={getattr(item.spec, item.field)}"
)
def test_just_outside_each_claim_there_is_a_reason(boundary: Boundary):
    reasons = [
        *backend.forward_capabilities.reasons(boundary.spec),
        *backend.backward_capabilities.reasons(boundary.spec),
    ]
    assert boundary.field in [reason.field for reason in reasons]
