"""Small calls of every kernel, for NVIDIA's compute-sanitizer; each is held to the oracle too.

    PYTHONPATH=.:backends PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitized.py
    PYTHONPATH=.:backends compute-sanitizer --tool racecheck --error-exitcode 9 \\
        python tests/gpu/sanitized.py [TEXT ...]

Without torch's caching allocator each tensor is an allocation of its own, so that memcheck sees an
access one element past it. Only calls run whose name contains every TEXT. Exits 1 when a result
leaves its error budget, 9 when the sanitizer finds a fault.
"""

from __future__ import annotations

import sys

import torch
from csa_backend_triton import hopper_window

from csa_dispatch.testing import Case, attention_run, check_case

KINDS = (
    {"kind": "gather"},
    {"kind": "gather", "documents": "cu_seqlens", "index_dtype": "int64"},
    {"kind": "dense-compressed"},
    {"kind": "window", "documents": "doc_ids", "batch": 2},
)
SHAPES = (
    # The specialised kernels on SM90.
    {"heads": 64, "head_dim": 512, "dtype": "bfloat16"},
    {"heads": 64, "head_dim": 128, "dtype": "bfloat16"},
    {"heads": 31, "head_dim": 80, "dtype": "float16"},
    {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": "float32"},
)
SIZES = {"tokens": 24, "pool": 70, "slots": 67, "window": 9, "content": "scattered"}
KEYS_KEPT = Case(  # type: ignore[arg-type]
    **{**SIZES, **KINDS[-1], **SHAPES[0], "tokens": 70, "window": 50, "heads": 9}
)
"""For the kernels that keep a window's keys in shared memory; others take calls this short."""


def cases() -> list[Case]:
    """Every kind at every shape and the deterministic backward of each, and ``KEYS_KEPT``."""
    made = [
        Case(**{**SIZES, **kind, **shape, "deterministic": deterministic})  # type: ignore
        for shape in SHAPES
        for kind in KINDS
        for deterministic in (False, True)
    ]
    # Last, since it changes which kernels are chosen.
    return [*made, KEYS_KEPT]


def main(texts: list[str]) -> int:
    failed = 0
    for case in cases():
        if not all(text in case.name for text in texts):
            continue
        if case is KEYS_KEPT:
            hopper_window.FEWEST_ROWS = hopper_window.FEWEST_TOKENS = 1  # type: ignore[misc]
        result = check_case(case, attention_run("triton", "triton"), device="cuda")
        torch.cuda.synchronize()
        failed += result.status != "pass"
        print(result.status, case.name, result.message, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
