"""Both API generations of attn-gym, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.backends.attention_gym.through_the_library"
OLDER = "0.0.13"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the version before packed offsets."""
    folder = tmp_path_factory.mktemp("attn-gym")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    try:
        subprocess.run([*pip, f"attn-gym=={OLDER}"], capture_output=True, timeout=120, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            raise  # what CI could not check must not look checked
        pytest.skip(f"pip cannot bring attn-gym {OLDER} here: {error}")
    return folder


def report(*folders: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_calls_through_the_installed_version_are_right():
    if importlib.util.find_spec("attn_gym") is None:
        pytest.skip("attn-gym is not installed")
    found = report()
    assert found["packed_offsets"]
    assert found["cases"] > 15
    assert found["failed"] == []
    assert found["here"] == []
    assert found["cuda"] == "attention_gym"
    assert "forward: attention_gym" in found["cpu"]


def test_calls_through_the_version_without_offsets_are_right(older: Path):
    found = report(older)
    assert found["version"] == OLDER
    assert not found["packed_offsets"]
    assert found["cases"] > 15
    assert found["failed"] == []
    assert found["here"] == []
    assert found["cuda"] == "attention_gym"
    # Its reference lets unused rows leak, so on a CPU there is a Reason.
    assert "forward: none" in found["cpu"]
    assert "gather_attn with cu_seqlens on a CPU" in found["cpu"]
