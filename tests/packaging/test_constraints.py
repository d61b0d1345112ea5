"""The environment that `make env` builds is pinned as a whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OWN = {"csa-dispatch"}


def pins() -> dict[str, str]:
    """``{name: version}`` of the constraints that apply to this Python."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                (specifier,) = requirement.specifier
                assert specifier.operator == "==", line
                assert requirement.name not in found, f"{requirement.name} is pinned twice"
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


def needed(root: str, extras: tuple[str, ...]) -> set[str]:
    """Installed distributions that ``root[extras]`` pulls in, torch's own needs aside."""
    found: set[str] = set()
    queue = [(root, extras)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while queue:
        item = queue.pop()
        if item in seen:
            continue
        seen.add(item)
        name, wanted = item
        found.add(canonicalize_name(name))
        if name == "torch":
            continue  # it pins what it needs, and CUDA builds need much
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                queue.append((requirement.name, tuple(sorted(requirement.extras))))
    return found - OWN


def test_every_package_that_development_pulls_in_is_pinned():
    try:
        everything = needed("csa-dispatch", ("dev", "docs"))
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: not an environment of `make env`")
    assert everything - set(pins()) == set()


def test_bootstrap_refuses_an_unsupported_interpreter(tmp_path: Path):
    for name in ("pyproject.toml", "constraints.txt", "scripts/bootstrap.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["bash", "scripts/bootstrap.sh"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "PYTHON=false is not a Python 3.10 to 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()
