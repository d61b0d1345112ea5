"""Memory beyond results stays bounded, whatever the length: by the real launch code, no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("workspace.py")
LIMIT = 512 << 20
PLAN_BYTES = 16
"""A token, and the Hopper forward has no more: a plan of its keys."""


@pytest.mark.timeout(900)
def test_a_backward_holds_at_most_512_mib() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) > 20
    assert all(item["backward"] > 0 for item in found)
    over = {item["name"]: item["backward"] >> 20 for item in found if item["backward"] > LIMIT}
    assert not over
    longest = 1 << 20
    assert max(item["forward"] for item in found) <= PLAN_BYTES * longest + 64
