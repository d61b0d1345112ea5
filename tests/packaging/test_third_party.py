"""The example of a third party's backend installs as a package of its own and conforms."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example away from the repository, for a build to leave its traces in."""
    target = tmp_path_factory.mktemp("third_party") / "source"
    left = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".pytest_cache")
    shutil.copytree(EXAMPLE, target, ignore=left)
    return target


@pytest.fixture(scope="module")
def environment(copy: Path) -> dict[str, str]:
    """Environment of a process in which the example is installed, without a network."""
    site = copy.parent / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(site), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return {**found, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def run(*command: str, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_lists_it_once_installed(environment: dict[str, str], tmp_path: Path):
    listed = json.loads(
        run("csa_dispatch", "backends", "--json", environment=environment, folder=tmp_path)
    )
    (row,) = [row for row in listed if row["name"] == "rowwise"]
    assert row["available"]
    assert row["version"] == "csa-rowwise 0.1.0"
    assert row["origin"] == "csa_rowwise:backend"


def test_its_own_tests_pass_where_it_is_installed(environment: dict[str, str], copy: Path):
    options = ("-q", "-p", "no:cacheprovider")
    done = run("pytest", *options, "tests", environment=environment, folder=copy)
    assert "2 passed" in done


def test_it_is_not_known_where_it_is_not_installed(tmp_path: Path):
    listed = json.loads(
        run("csa_dispatch", "backends", "--json", environment={**os.environ}, folder=tmp_path)
    )
    assert "rowwise" not in {row["name"] for row in listed}
