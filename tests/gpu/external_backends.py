"""Check and time the backends over other libraries on an H100 or H200, against ours.

    PYTHONPATH=.:backends python tests/gpu/external_backends.py [flex] [attention_gym] [cudnn]

Each part (all by default) runs in a process of its own with a time limit; the exit code is the
number of parts that failed. Results are judged against the float64 oracle within error budgets;
times are medians, side by side with our Triton kernels in the same process.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from csa_backend_eager import backend as eager
from csa_backend_triton import backend as triton
from torch import Tensor

from csa_dispatch.backend import Backend
from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.bench.memory import extra_memory
from csa_dispatch.bench.suite import BenchCase, Effort, Limits
from csa_dispatch.bench.timing import clock_for, spread, time_interleaved
from csa_dispatch.call import Call, Kind
from csa_dispatch.testing import Case, backend_run, check_case

ALL = (True, True, True, True)
NONE = (False, False, False, False)
CUDA = torch.device("cuda")
SECONDS = {"flex": 400, "attention_gym": 400, "cudnn": 180}
Changes = list[dict[str, object]]


def check(title: str, forward: Backend, backward: Backend, base: dict, changes: Changes) -> bool:
    """Run small calls and print each one's share of its error budget."""
    passed = True
    for change in changes:
        case = Case(**{**base, **change})
        began = time.perf_counter()
        result = check_case(case, backend_run(forward, backward), device=CUDA)
        passed &= result.status == "pass"
        seconds = time.perf_counter() - began
        print(f"{title} {result.status} {result.share:.2f} {seconds:.1f}s {result.name}", end=" ")
        print(result.message[:600], flush=True)
    return passed


def sized(kind: Kind = Kind.GATHER, **sizes: object) -> BenchCase:
    """A full-size call: A of the performance page unless ``sizes`` say otherwise."""
    base: dict[str, object] = {"tokens": 4096, "heads": 64, "head_dim": 512, "slots": 512}
    base |= {"window": 128, "compress_ratio": 4, "indices": "full", "dtype": "bfloat16"}
    base |= {"batch": 1, "kv_heads": 1, "index_dtype": "int32", "sink": "float32", **sizes}
    pool = int(str(base["tokens"])) // int(str(base["compress_ratio"]))
    fixed = {"pool": 0 if kind is Kind.WINDOW else pool, "seed": 0, "directions": ()}
    return BenchCase(
        name="", series="", kind=kind, deterministic=False, limits=Limits(), **fixed, **base
    )  # type: ignore


def by_token(tensor: Tensor) -> Tensor:
    """The same ``[B, H, T, D]``, lying as ``[B, T, H, D]``."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def clocked(title: str, runs: dict[str, Callable[[], object]], seconds: float = 0.4) -> None:
    """Print medians of calls that take turns."""
    clock = clock_for(CUDA, flush_l2=True)
    for name, samples in time_interleaved(runs, clock, Effort(rounds=5, seconds=seconds)).items():
        found = spread([sample.elapsed for sample in samples])
        print(f"{title} {name}: {found.median:.3f} ms (IQR {found.iqr:.3f})", flush=True)


def against_ours(title: str, case: BenchCase, other: Backend, *, gradients: bool = True) -> None:
    """Times of both backends' calls, forward and backward."""
    call, grad = build_inputs(case, CUDA)
    results = triton.forward(call)
    runs: dict[str, Callable[[], object]] = {}
    for backend in (triton, other):
        runs[f"{backend.name} forward"] = functools.partial(backend.forward, call)
        if gradients:
            runs[f"{backend.name} backward"] = functools.partial(
                backend.backward, call, *results, grad, needs_of(call)
            )
    clocked(title, runs)


def needs_of(call: Call) -> tuple[bool, bool, bool, bool]:
    return (True, True, call.sparse_kv is not None, True)


def relative(found: Tensor | None, right: Tensor | None) -> float:
    assert found is not None
    assert right is not None
    return float((found.double() - right.double()).norm() / right.double().norm())


def flex() -> bool:
    from csa_backend_flex import backend
    from csa_backend_flex.masks import build_block_mask
    from csa_backend_flex.spans import spans_of

    tokens = 32768
    for ratio in (None, 128):
        row = torch.empty(1, 1, tokens, 16, device=CUDA, dtype=torch.bfloat16)
        pool = None if ratio is None else row[:, :, : tokens // ratio]
        call = Call(row, row, pool, None, None, None, None, None, 128, ratio, 1.0)
        rows = 0 if pool is None else pool.shape[2]
        build = functools.partial(build_block_mask, spans_of(call), rows)
        build()
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            began = time.perf_counter()
            mask = build()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        peak = extra_memory(lambda build=build: [build().kv_indices], CUDA)
        title = "window" if ratio is None else f"ratio {ratio}"
        print(f"BlockMask of {tokens} tokens, {title}: {spread(times).median:.2f} ms,", end=" ")
        print(f"peak {peak / 2**20:.2f} MiB, {mask.shape}", flush=True)
    small = {"dtype": "bfloat16", "heads": 8, "tokens": 300, "pool": 150, "compress_ratio": 2}
    base = {**small, "window": 140, "head_dim": 128, "kind": Kind.DENSE}
    wide = {"heads": 64, "head_dim": 512}
    passed = check("flex", backend, backend, base, [wide, {**wide, "kind": Kind.WINDOW}])
    against_ours("A, window only", sized(Kind.WINDOW), backend)
    long = sized(Kind.DENSE, tokens=16384, compress_ratio=128)
    against_ours("T=16384, ratio 128", long, backend)
    passed &= check(
        "flex",
        backend,
        backend,
        base,
        [
            {"documents": "cu_seqlens"},
            {"content": "nan"},
            {"documents": "doc_ids", "batch": 2, "memory": "strided"},
            {"kind": Kind.WINDOW, "tokens": 100, "deterministic": True},
            {"dtype": "float32", "head_dim": 64, "kv_heads": 2, "sink": "none"},
            {"dtype": "float16", "head_dim": 16, "heads": 1},
        ],
    )
    against_ours("C, window only", sized(Kind.WINDOW, head_dim=128), backend)
    return passed


def attention_gym() -> bool:
    from csa_backend_attention_gym import backend

    base = {"dtype": "bfloat16", "heads": 64, "tokens": 150, "head_dim": 512, "pool": 60}
    base |= {"slots": 8, "window": 128, "needs_grad": NONE}
    narrow = {"head_dim": 64, "heads": 4, "content": "nan"}
    window = {"kind": Kind.WINDOW, "needs_grad": (True, True, False, True), "head_dim": 128}
    passed = check(
        "attention_gym",
        backend,
        backend,
        base,
        [
            {**window},
            {**window, "documents": "cu_seqlens", "dtype": "float16"},
            {**window, "content": "nan", "head_dim": 512},
            {"slots": 16, "head_dim": 128},
            {},
            {"slots": 8, "head_dim": 64, "heads": 4, "kv_heads": 4, "documents": "cu_seqlens"},
            *({**narrow, "dtype": dtype} for dtype in ("float32", "float16")),
        ],
    )
    few = sized(slots=16, head_dim=128)
    against_ours("C with 16 slots", few, backend, gradients=False)
    return passed


def cudnn() -> bool:
    from csa_backend_cudnn import backend

    base = {"dtype": "bfloat16", "heads": 64, "tokens": 40, "head_dim": 512, "pool": 300}
    base |= {"slots": 130, "window": 128}
    passed = check(
        "eager+cudnn",
        eager,
        backend,
        base,
        [
            {},
            {"content": "nan"},
            {"content": "duplicates", "pool": 3},
            {"content": "poisoned", "window": 0, "slots": 300},
            {"documents": "cu_seqlens", "tokens": 300, "slots": 200},
            {"documents": "doc_ids", "batch": 2, "memory": "strided"},
            {"heads": 128},
            {"heads": 3, "dtype": "float16", "sink": "none"},
            {"kind": Kind.DENSE, "compress_ratio": 2, "slots": 0},
        ],
    )
    for indices in ("full", "causal"):
        passed &= backwards_compared(f"A {indices}", sized(indices=indices))
        large = sized(indices=indices, tokens=8192, heads=128, slots=1024)
        passed &= backwards_compared(f"B {indices}", large)
    return passed


def backwards_compared(title: str, case: BenchCase) -> bool:
    """cuDNN's gradients of a full-size call against ours, and both backends' times and memory."""
    from csa_backend_cudnn import backend, backward
    from csa_backend_cudnn.operands import build_operands

    call, grad = build_inputs(case, CUDA)
    output, lse = triton.forward(call)
    ours = triton.backward(call, output, lse, grad, ALL)
    theirs = backend.backward(call, output, lse, grad, ALL)
    found = [relative(x, y) for x, y in zip(theirs, ours, strict=True)]
    print(title, "cudnn against ours:", *(f"{error:.1e}" for error in found), flush=True)
    del theirs, ours
    for lie, place in (("by head", lambda tensor: tensor), ("by token", by_token)):
        lying = call._replace(query=place(call.query))
        arguments = (lying, place(output), lse, place(grad), ALL)
        runs: dict[str, Callable[[], object]] = {
            name: functools.partial(each.backward, *arguments)
            for name, each in (("triton", triton), ("cudnn", backend))
        }
        clocked(f"{title} {lie}", runs)
        for name, run in runs.items():
            extra = extra_memory(run, CUDA) / 2**20  # type: ignore
            print(f"{title} {lie} {name}: {extra:.0f} MiB beyond results", flush=True)
    operands = build_operands(call)
    backward.build_operands = lambda _: operands
    clocked(f"{title} by token, slots ready", {"cudnn": runs["cudnn"]})
    backward.build_operands = build_operands
    return max(found) < 1e-2


PARTS = {"flex": flex, "attention_gym": attention_gym, "cudnn": cudnn}


def main(names: list[str]) -> int:
    """Run parts, each in a process of its own; the number that failed."""
    failed = 0
    for name in names or PARTS:
        command = [sys.executable, __file__, "--part", name]
        try:
            code = subprocess.run(command, timeout=SECONDS[name], check=False).returncode
            verdict = f"failed ({code})" if code else "passed"
        except subprocess.TimeoutExpired:
            verdict = f"cut off after {SECONDS[name]} s"
        print(f"{name}: {verdict}", flush=True)
        failed += verdict != "passed"
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        print(torch.cuda.get_device_name(), "torch", torch.__version__, time.strftime("%Y-%m-%d"))
        sys.exit(not PARTS[sys.argv[2]]())
    sys.exit(main(sys.argv[1:]))
