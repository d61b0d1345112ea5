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
# Window-only calls long enough for the kernels that keep their keys in shared memory.
LONG_WINDOW = {"tokens": 1030, "window": 100, "heads": 16, "head_dim": 512, "dtype": "bfloat16"}


def cases() -> list[Case]:
    """Every kind at every shape, the deterministic backward of each, and a long window."""
    made = [
        Case(**{**SIZES, **kind, **shape, "deterministic": deterministic})  # type: ignore
        for shape in SHAPES
        for kind in KINDS
        for deterministic in (False, True)
    ]
    return [*made, Case(**{**SIZES, **KINDS[-1], **LONG_WINDOW})]  # type: ignore


def main(texts: list[str]) -> int:
    failed = 0
    for case in cases():
        if not all(text in case.name for text in texts):
            continue
        result = check_case(case, attention_run("triton", "triton"), device="cuda")
        torch.cuda.synchronize()
        failed += result.status != "pass"
        print(result.status, case.name, result.message, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
