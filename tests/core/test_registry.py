"""Plug-ins: whatever a package does wrong becomes a row with its reason, never an import error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import csa_dispatch
from csa_dispatch import Availability, Backend, Capabilities, backends
from csa_dispatch.operations import SPECS
from tests.core.probes import WindowBackend

GOOD = """
from csa_dispatch import Backend, Capabilities
class Mine(Backend):
    name = {name!r}
    forward_capabilities = Capabilities()
backend = Mine()
"""
FAULTS = {
    "import_error": ("import a_module_nobody_has", "ModuleNotFoundError"),
    "os_error": ("raise OSError('libcuda.so.1: cannot open')", "libcuda.so.1"),
    "runtime_error": ("raise RuntimeError('driver too old')", "driver too old"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "no_attribute": ("", "has no attribute 'backend'"),
    "not_a_backend": ("backend = object()", "not a csa_dispatch.Backend"),
    "other_name": (GOOD.format(name="someone_else"), "called 'someone_else'"),
    "bad_probe": (
        GOOD.format(name="bad_probe").replace(
            "backend =", "Mine.probe = lambda s: 1 / 0\nbackend ="
        ),
        "ZeroDivisionError",
    ),
    "none_claims": (
        GOOD.format(name="none_claims").replace("Capabilities()", "None"),
        "with forward_capabilities None",
    ),
    "odd+name": (GOOD.format(name="odd+name"), "with name 'odd+name'"),
    "no_claims": (
        "from csa_dispatch import Backend\n"
        "class M(Backend):\n    name = 'no_claims'\nbackend = M()",
        "without forward_capabilities",
    ),
}
LIST = """
import json, csa_dispatch
print(json.dumps({name: [row.available, str(row.availability.reason)]
                  for name, row in csa_dispatch.backends().items()}))
"""


def install(root: Path, name: str, source: str, entry: str) -> None:
    """A distribution as pip leaves it: a module and metadata with an entry point."""
    (root / f"plug_{name}.py").write_text(source)
    info = root / f"plug_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plug-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[csa_dispatch.backends]\n{entry} = plug_{name}:backend\n"
    )


def test_broken_plugins_become_rows_and_good_ones_load(tmp_path: Path) -> None:
    for name, (source, _) in FAULTS.items():
        install(tmp_path, name.replace("+", "_"), source, name)
    install(tmp_path, "good", GOOD.format(name="good"), "good")
    install(tmp_path, "thief", GOOD.format(name="eager"), "eager")
    run = subprocess.run(
        [sys.executable, "-c", LIST],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(run.stdout)
    for name, (_, reason) in FAULTS.items():
        available, text = rows[name]
        assert not available, name
        assert reason in text, (name, text)
    assert rows["good"][0]
    assert rows["eager"][0], "an in-tree name cannot be taken"
    assert "name already taken" in rows["eager (plug_thief:backend)"][1]


def test_registering_checks_type_and_name(registered: Any) -> None:
    with pytest.raises(TypeError, match="must be a Backend"):
        csa_dispatch.register_backend(object())  # pyright: ignore[reportArgumentType]
    registered(WindowBackend("mine"))
    with pytest.raises(ValueError, match="'mine' is already registered"):
        csa_dispatch.register_backend(WindowBackend("mine"))
    csa_dispatch.register_backend(WindowBackend("mine"), replace=True)
    csa_dispatch.unregister_backend("mine")
    with pytest.raises(ValueError, match="'mine'; it must be one of"):
        csa_dispatch.unregister_backend("mine")


@pytest.mark.parametrize("name", ["", " ", "a ", "a+b", "a b+c"])
def test_names_that_no_policy_could_write_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"backend\.name is '.*'; it must be of .*\+.* Set"):
        csa_dispatch.register_backend(WindowBackend(name))
    assert name not in csa_dispatch.backends()


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("name", None, "backend.name is None; it must be a string"),
        ("forward_capabilities", None, "forward_capabilities is None; it must be a Capabilities"),
        ("forward_capabilities", {}, "forward_capabilities is a dict; it must be a Capabilities"),
        ("backward_capabilities", True, "backward_capabilities is a bool; it must be a Cap"),
    ],
)
def test_attributes_of_another_type_are_refused(attribute: str, value: Any, text: str) -> None:
    backend = WindowBackend("mine")
    setattr(backend, attribute, value)
    with pytest.raises(TypeError, match=text):
        csa_dispatch.register_backend(backend)
    assert "mine" not in csa_dispatch.backends()


def test_a_backend_without_capabilities_is_refused() -> None:
    class Bare(Backend):
        name = "bare"

    with pytest.raises(TypeError, match="forward_capabilities is None; it must be a Capabilities"):
        csa_dispatch.register_backend(Bare())


def test_unavailable_backend_is_refused_with_its_reason(registered: Any) -> None:
    class Missing(WindowBackend):
        def probe(self) -> Availability:
            reason = csa_dispatch.Reason("availability", "not installed", "libfast", "pip it")
            return Availability("", reason)

    registered(Missing("missing"))
    decision = csa_dispatch.explain(csa_dispatch.CallSpec(), backend="missing")
    assert decision.forward is None
    assert decision.considered[0].reasons[0].remedy == "pip it"
    elsewhere = csa_dispatch.explain(csa_dispatch.CallSpec(), backend="missing", device="sm_90")
    assert elsewhere.forward == "missing", (
        "what is installed here does not count for other hardware"
    )


def test_backend_without_a_direction_says_so() -> None:
    class Bare(Backend):
        name = "bare"
        forward_capabilities = Capabilities()

    with pytest.raises(NotImplementedError, match="'bare' has no forward"):
        Bare().forward(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("operation", SPECS)
@pytest.mark.parametrize("name", ["eager", "triton", "attention_gym", "fa4", "cudnn", "flex"])
def test_every_bound_of_our_backends_has_a_remedy(name: str, operation: str) -> None:
    backend = backends()[name].backend
    assert backend is not None
    implementation = backend.implementation(operation)
    if implementation is None:
        return
    for claims in (implementation.forward_capabilities, implementation.backward_capabilities):
        if claims is not None:
            bounds = claims.bounds().items()
            breakable = {field for field, allowed in bounds if allowed.outside()}
            assert breakable <= {field for field, _ in claims.remedies}
