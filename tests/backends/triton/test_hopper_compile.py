"""The Hopper kernels compile within a multiprocessor's means, wgmma running asynchronously."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SPILL_LIMIT = 640
"""Bytes, stores and loads together, over a kernel's whole text."""


def test_the_hopper_kernels_compile_within_their_means() -> None:
    program = Path(__file__).with_name("hopper_compile.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(program)],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    for kernel in kernels:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["spills"] <= SPILL_LIMIT, kernel
        assert not kernel["serialized"], kernel
    main = [kernel for kernel in kernels if kernel["wgmma"]]
    # Forward: gathered and dense. Backward: gathered, dense, and ordered, which alone adds
    # nothing atomically.
    assert [k["kernel"].startswith("forward") for k in main].count(True) == 2
    assert [k["kernel"].startswith("backward") for k in main].count(True) == 3
    assert [k["reductions"] > 0 for k in main].count(True) == 2
    assert not any(kernel["other_atomics"] for kernel in kernels)
