"""G31: selected rows are never spread out to a dense [B, T, S, D] tensor, forward or backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOKENS, SLOTS, WINDOW, HEAD_DIM = 2048, 16, 16, 64
LIMIT = 8 * TOKENS * (SLOTS + WINDOW) * HEAD_DIM * 4

# The kernel's own high-water mark of resident memory, reset after a small call has loaded all.
PROGRAM = f"""
import torch
from csa_dispatch.testing import attention_run
from csa_dispatch.testing.field_case import make_inputs, randn
from csa_dispatch.testing.field_relations import random_slots

def call(tokens):
    query, local, pool = randn(31, *[(1, 1, tokens, {HEAD_DIM})] * 3)
    table = random_slots(31, 1, tokens, {SLOTS}, tokens)
    device = torch.device("cpu")
    return make_inputs("float32", device, query, local, pool, table, window={WINDOW})

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

run = attention_run(BACKEND)
run(call(64))
inputs = call({TOKENS})
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
run(inputs)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_memory_grows_with_slots_and_not_with_the_pool(backend: str):
    if backend == "triton":
        pytest.skip("interpreted kernels take numpy's memory, and minutes")
    program = PROGRAM.replace("BACKEND", repr(backend))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    assert 0 < peak < LIMIT, f"{peak / 2**20:.0f} MiB, allowed {LIMIT / 2**20:.0f} MiB"
