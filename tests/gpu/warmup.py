"""On a GPU: after ``warmup`` first calls compile nothing, and how long both take.

    PYTHONPATH=.:backends python tests/gpu/warmup.py

Warmup, the calls after it, and the same calls with nothing compiled ahead run in processes of
their own, the last with an empty cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from csa_backend_triton import warmup
from csa_backend_triton.compiling import meta_call
from torch import Tensor

from csa_dispatch import Kind, attention, use_backend
from csa_dispatch.call_spec import CallSpec, device_capability

SIZES: dict[str, Any] = {"tokens": 1024, "pool": 256, "slots": 64, "window": 128}
CALLS = {
    "gather, head_dim 512": CallSpec(**SIZES),
    "gather, head_dim 128": CallSpec(**SIZES | {"head_dim": 128}),
    "gather, head_dim 96": CallSpec(**SIZES | {"head_dim": 96, "heads": 8}),
    "gather, deterministic": CallSpec(**SIZES, deterministic=True),
    "window": CallSpec(**SIZES | {"pool": 0, "slots": 0}, kind=Kind.WINDOW, index_dtype="none"),
    "window, 16 heads": CallSpec(
        **SIZES | {"heads": 16, "pool": 0, "slots": 0}, kind=Kind.WINDOW, index_dtype="none"
    ),
    "dense": CallSpec(
        **SIZES | {"slots": 0, "pool": 8},
        kind=Kind.DENSE,
        compress_ratio=128,
        index_dtype="none",
    ),
}


def here(spec: CallSpec) -> CallSpec:
    """The spec on this machine's GPU, differentiated by all that it has."""
    capability = device_capability(torch.device("cuda", 0))
    needs = (True, True, spec.kind is not Kind.WINDOW, spec.sink != "none")
    return spec._replace(device_type="cuda", capability=capability, needs_grad=needs)


def filled(tensor: Tensor | None) -> Tensor | None:
    """A CUDA tensor like a meta one: small normal numbers, or zeros for integers."""
    if tensor is None:
        return None
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cuda")
    return made.normal_().requires_grad_() if made.is_floating_point() else made


def run(spec: CallSpec) -> None:
    """One forward and backward of a call that ``spec`` describes."""
    call = meta_call(spec)
    torch.use_deterministic_algorithms(spec.deterministic)
    output = attention(
        *(filled(tensor) for tensor in call[:5]),  # pyright: ignore[reportArgumentType]
        sliding_window_size=call.sliding_window_size,
        compress_ratio=call.compress_ratio,
    )
    output.backward(torch.ones_like(output))
    torch.cuda.synchronize()


def child(what: str) -> None:
    """``warmup`` all calls or make them, saying how long it took."""
    start = time.perf_counter()
    if what == "warmup":
        count = warmup([here(spec) for spec in CALLS.values()], workers=os.cpu_count() or 1)
        print(f"  warmup: {count} kernels, {time.perf_counter() - start:.1f} s", flush=True)
        return
    with use_backend("triton"):
        for name, spec in CALLS.items():
            start = time.perf_counter()
            run(here(spec))
            print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)


def compiled(cache: Path) -> set[str]:
    """The kernels in a cache."""
    return {str(path.relative_to(cache)) for path in cache.rglob("*.cubin")}


def main() -> int:
    # The deterministic call's matrix products.
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with TemporaryDirectory() as ahead, TemporaryDirectory() as cold:
        found = []
        for cache, what in ((ahead, "warmup"), (ahead, "calls"), (cold, "calls")):
            print(f"{what}, {len(compiled(Path(cache)))} kernels on disk", flush=True)
            command = [sys.executable, __file__, what]
            subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": cache}, check=True)
            found.append(compiled(Path(cache)))
    before, after, needed = found
    print(f"compiled after warmup: {len(after - before)}; needed: {len(needed)}")
    missed = sorted(path for path in after - before)
    print("\n".join(missed) or "first calls after warmup compile nothing")
    return int(bool(missed) or not needed)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    child(sys.argv[1])
