"""The GPU lane fails when it runs nothing, rather than pass."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

LANE = Path(__file__).parents[2] / ".ci" / "gpu"


@pytest.mark.parametrize(
    ("part", "jobs", "message"),
    [
        ("chekcs", "", "chekcs is no part"),
        ("times", "no-such-job", "no job ran: JOBS is 'no-such"),
    ],
)
def test_a_lane_that_runs_nothing_fails(
    tmp_path: Path, part: str, jobs: str, message: str
) -> None:
    done = subprocess.run(
        ["bash", str(LANE), str(tmp_path / "out"), part],
        env={**os.environ, "JOBS": jobs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
