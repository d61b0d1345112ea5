"""``import csa_dispatch`` is cheap and needs torch alone. Each check runs in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONAL = (
    "triton",
    "attn_gym",
    "flash_attn",
    "cudnn",
    "transformers",
    "rich",
    "typer",
    "matplotlib",
    "jinja2",
    "numpy",
)


def run_fresh(code: str) -> str:
    """Standard output of ``code`` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_optional_dependency():
    code = """
import sys, json, torch
before = set(sys.modules)
import csa_dispatch
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(run_fresh(code)))
    assert "csa_dispatch" in loaded
    assert loaded.isdisjoint(OPTIONAL), loaded & set(OPTIONAL)
    assert not {name for name in loaded if name.startswith("csa_backend_")}


def test_import_initialises_no_cuda():
    code = """
import torch, csa_dispatch
csa_dispatch.explain(csa_dispatch.CallSpec(), device="sm_90")
print(torch.cuda.is_initialized())
"""
    assert run_fresh(code).strip() == "False"


def test_attention_runs_forward_and_backward_with_torch_alone():
    # None in sys.modules is how Python marks a module as not there. torch needs jinja2 and, for
    # some of its own functions, numpy.
    absent = [name for name in OPTIONAL if name not in ("jinja2", "numpy")]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent!r}))
import torch, csa_dispatch
query = torch.randn(1, 2, 5, 8, requires_grad=True)
kv = torch.randn(1, 1, 5, 8)
with csa_dispatch.record_receipts() as receipts:
    csa_dispatch.attention(query, kv, sliding_window_size=3).sum().backward()
assert query.grad is not None and query.grad.isfinite().all()
print(" ".join(receipt.backend for receipt in receipts))
rows = csa_dispatch.backends()
print(rows["attention_gym"].availability.reason)
"""
    receipts, reason = run_fresh(code).splitlines()
    assert receipts == "eager eager"
    assert "attn_gym not installed" in reason


@pytest.mark.serial
def test_import_adds_under_150_ms_to_torch():
    code = """
import time, torch
start = time.perf_counter()
import csa_dispatch
print(time.perf_counter() - start)
"""
    run_fresh(code)  # the first run also compiles bytecode
    # The least of several: a neighbour's load can only add time.
    assert min(float(run_fresh(code)) for _ in range(5)) < 0.150
