"""Check and time the Hopper kernels on an H100 or H200.

    PYTHONPATH=.:backends python tests/gpu/hopper_kernels.py [cases] [sums] [races] [times]

Each part (all by default) runs in a process of its own with a time limit: a barrier bug in a
warp-specialised kernel hangs the GPU until its process is killed. The exit code is the number of
parts that failed.

cases   small calls of every kind of content, layout and size against the float64 oracle
sums    all gradients of a full-size call against float64 sums
races   100 repetitions: output, lse and dQ bit-equal, dKV equal but for the order of its sums
times   medians at the sizes A, B and C of the performance page, and W: A, window-only
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from csa_backend_triton import hopper, hopper_gradient, hopper_ordered
from torch import Tensor

from csa_dispatch.backend import Backend
from csa_dispatch.bench.suite import Effort
from csa_dispatch.bench.timing import clock_for, spread, time_interleaved
from csa_dispatch.call import Call, Gradients, Kind, token_bounds
from csa_dispatch.call_spec import deterministic_mode, spec_of
from csa_dispatch.testing import Case, backend_run, check_case

ALL = (True, True, True, True)
NONE = (False, False, False, False)
SECONDS = {"cases": 400, "sums": 120, "races": 120, "times": 120}
SIZES = {
    "A": (4096, 64, 512, 1024, 512),
    "B": (8192, 128, 1024, 2048, 512),
    "C": (4096, 64, 128, 1024, 128),
    "W": (4096, 64, 0, 0, 512),
}
"""Tokens, heads, slots, pool rows and head_dim; the window is 128. W is window-only."""


class Hopper(Backend):
    """The Hopper kernels alone: it refuses what the backend would leave to the portable ones."""

    name = "hopper"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        assert hopper.supports_forward(spec_of(call, NONE))
        return hopper.forward(call, token_bounds(call))

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        assert hopper.supports_backward(spec_of(call, needs))
        bounds, deterministic = token_bounds(call), deterministic_mode()
        return hopper.backward(call, bounds, output, lse, grad_output, needs, deterministic)


def small_cases() -> list[Case]:
    """Calls of few blocks and of many, on fewer and on more items than there are programs."""
    base = {
        "dtype": "bfloat16",
        "heads": 64,
        "tokens": 40,
        "head_dim": 512,
        "pool": 300,
        "slots": 130,
        "window": 128,
    }
    changes = [
        {"content": "random"},
        {},
        {"window": 100, "slots": 70, "pool": 40},
        {"heads": 100, "window": 1, "slots": 1},
        {"heads": 24, "tokens": 300},
        {"heads": 40, "dtype": "float16", "needs_grad": NONE},
        {"index_dtype": "int64", "sink": "same"},
        {"documents": "cu_seqlens", "tokens": 300, "slots": 200},
        {"documents": "doc_ids", "batch": 2},
        {"content": "nan"},
        {"content": "poisoned", "window": 0},
        {"content": "duplicates", "pool": 3},
        {"content": "scattered", "slots": 300, "tokens": 400},
        {"sink": "none", "slots": 64, "pool": 5, "window": 3},
        {"memory": "transposed", "batch": 2},
        {"memory": "expanded", "batch": 2},
        {"memory": "padded"},
        {"memory": "strided"},
        {"needs_grad": (True, False, True, False)},
        {"needs_grad": (False, True, False, True)},
    ]
    window = {"kind": Kind.WINDOW, "tokens": 1100}
    changes += [
        window,
        {**window, "window": 70, "tokens": 1030, "content": "random"},
        {**window, "tokens": 600},
        {**window, "window": 0, "sink": "none", "tokens": 40},
        {**window, "window": 200},
        {**window, "tokens": 300},
        {**window, "content": "nan"},
        {**window, "documents": "cu_seqlens", "content": "poisoned"},
        {**window, "documents": "doc_ids", "batch": 2, "tokens": 520},
        {**window, "heads": 100, "window": 1, "sink": "same", "tokens": 700},
        {**window, "heads": 16, "tokens": 3000, "content": "random"},
        {**window, "heads": 12, "tokens": 1400, "content": "nan", "sink": "none"},
        {**window, "heads": 12, "tokens": 1400, "documents": "cu_seqlens"},
        {**window, "heads": 16, "tokens": 1030, "documents": "doc_ids", "batch": 2},
        {**window, "heads": 9, "tokens": 2000, "dtype": "float16", "needs_grad": NONE},
        {**window, "memory": "expanded", "batch": 2},
        {**window, "memory": "transposed", "sink": "none"},
        {**window, "memory": "strided", "needs_grad": (False, True, False, True)},
        {**window, "needs_grad": (True, False, False, False), "tokens": 515},
    ]
    dense = {"kind": Kind.DENSE, "tokens": 300, "compress_ratio": 3}
    changes += [
        dense,
        {**dense, "batch": 2, "pool": 40, "window": 70, "content": "nan"},
        {**dense, "documents": "cu_seqlens", "heads": 100},
        {**dense, "documents": "doc_ids", "compress_ratio": 1, "window": 0, "tokens": 90},
        {**dense, "heads": 40, "dtype": "float16", "needs_grad": NONE},
    ]
    ordered = {"deterministic": True, "tokens": 300}
    changes += [
        ordered,
        {**ordered, "heads": 100, "batch": 2, "content": "nan"},
        {**ordered, "documents": "cu_seqlens", "content": "duplicates"},
        {**ordered, "kind": Kind.WINDOW, "window": 70, "documents": "doc_ids", "batch": 2},
        {**ordered, "window": 0, "content": "scattered"},
        {**ordered, "needs_grad": (False, False, True, False), "memory": "strided"},
    ]
    narrow: list[dict[str, object]] = [
        {"content": "random", "tokens": 1300},
        {"window": 100, "slots": 70, "pool": 40},
        {"heads": 100, "window": 1, "slots": 1},
        {"heads": 40, "tokens": 700, "content": "nan"},
        {"heads": 40, "dtype": "float16", "needs_grad": NONE},
        {"index_dtype": "int64", "sink": "same"},
        {"documents": "cu_seqlens", "tokens": 300, "slots": 200},
        {"content": "poisoned", "window": 0},
        {"content": "duplicates", "pool": 3},
        {"content": "scattered", "slots": 300, "tokens": 400},
        {"sink": "none", "slots": 64, "pool": 5, "window": 3},
        {"memory": "transposed", "batch": 2},
        {"memory": "strided"},
        {"needs_grad": (True, False, True, False)},
        {"needs_grad": (False, True, False, True)},
    ]
    changes += [{"head_dim": 128, **change} for change in narrow]
    return [Case(**{**base, **change}) for change in changes]  # type: ignore[arg-type]


@contextmanager
def few_tokens_a_chunk() -> Iterator[None]:
    """Ordered backwards in chunks that hold 15 tokens."""
    whole = hopper_ordered.chunk_tokens
    hopper_ordered.chunk_tokens = lambda *_: 15  # type: ignore
    try:
        yield
    finally:
        hopper_ordered.chunk_tokens = whole


def cases() -> bool:
    run = backend_run(Hopper())
    passed = True
    for case in small_cases():
        # What the allocator hands out next is NaN: an element left unwritten shows.
        torch.full((1 << 26,), float("nan"), device="cuda")
        result = check_case(case, run, device="cuda")
        passed &= result.status == "pass"
        if case.deterministic:
            # Again in chunks of a few tokens, whose windows reach over several chunks.
            with few_tokens_a_chunk():
                short = check_case(case, run, device="cuda")
            passed &= short.status == "pass"
            print(f"{short.status} {short.share:.2f} in short chunks {short.message}")
        print(f"{result.status} {result.share:.2f} {result.name} {result.message}", flush=True)
    return passed


def full_size(size: str, causal: bool) -> tuple[Call, Tensor]:
    """The call of a size and an upstream gradient; causal: index < (t + 1) // 4, the rest -1."""
    tokens, heads, slots, pool, head_dim = SIZES[size]
    torch.manual_seed(0)
    limit = torch.full((tokens,), pool, device="cuda")
    if causal:
        limit = ((torch.arange(tokens, device="cuda") + 1) // 4).clamp(max=pool)
    order = torch.rand(tokens, pool, device="cuda")
    order.masked_fill_(torch.arange(pool, device="cuda") >= limit[:, None], 2.0)
    value, index = order.topk(slots, largest=False)
    indices = torch.where(value < 2.0, index, -1).int()[None]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query, local = draw(1, heads, tokens, head_dim), draw(1, 1, tokens, head_dim)
    gathered = (draw(1, 1, pool, head_dim), indices) if slots else (None, None)
    sink = torch.randn(heads, device="cuda")
    call = Call(query, local, *gathered, sink, None, None, None, 128, None, head_dim**-0.5)
    return call, torch.randn_like(query)


def float64_gradients(call: Call, grad_output: Tensor) -> Gradients:
    """Gradients of a bf16 call without documents, summed in float64, 64 tokens at a time."""
    local = call.local_kv[0, 0].double()
    pool = local[:0] if call.sparse_kv is None else call.sparse_kv[0, 0].double()
    none = torch.empty(len(local), 0, device="cuda")
    indices = none if call.kv_indices is None else call.kv_indices[0]
    sink, window = call.attention_sink.double(), call.sliding_window_size  # type: ignore
    grads = [torch.zeros(x.shape, device="cuda", dtype=torch.float64) for x in (local, pool, sink)]
    grad_query = torch.empty_like(call.query, dtype=torch.float32)
    for begin in range(0, call.query.shape[2], 64):
        t = torch.arange(begin, min(begin + 64, call.query.shape[2]), device="cuda")
        rows = t[:, None] - window + 1 + torch.arange(window, device="cuda")
        slots = indices[t].long()
        used = torch.cat([rows >= 0, slots >= 0], 1)
        rows, slots = rows.clamp(min=0), slots.clamp(min=0)
        keys = torch.cat([local[rows], pool[slots]], 1)
        query, grad = (x[0, :, t].double().transpose(0, 1) for x in (call.query, grad_output))
        scores = (query @ keys.mT * call.scale).masked_fill(~used[:, None], -torch.inf)
        weights = torch.cat([scores, sink[None, :, None].expand(len(t), -1, 1)], 2).softmax(2)
        share, weights = weights[..., -1], weights[..., :-1]
        upstream = grad @ keys.mT
        delta = (weights * upstream).sum(2)
        d_scores = weights * (upstream - delta[..., None]) * call.scale
        grad_query[0, :, t] = (d_scores @ keys).transpose(0, 1).float()
        d_keys = (weights.mT @ grad + d_scores.mT @ query) * used[..., None]
        grads[0].index_add_(0, rows.flatten(), d_keys[:, :window].flatten(0, 1))
        grads[1].index_add_(0, slots.flatten(), d_keys[:, window:].flatten(0, 1))
        grads[2] -= (share * delta).sum(0)
    return Gradients(grad_query, grads[0][None, None], grads[1][None, None], grads[2])


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def sums() -> bool:
    passed = True
    for size, causal in (("A", True), ("A", False), ("B", True), ("C", True), ("W", False)):
        call, grad = full_size(size, causal)
        results = hopper.forward(call, None)
        right = float64_gradients(call, grad)
        differentiate = hopper.backward if size == "W" else hopper_gradient.backward
        for deterministic in (False,) if size in "CW" else (False, True):
            found = differentiate(call, None, *results, grad, ALL, deterministic)
            pairs = zip(found, right, strict=True)
            errors = [relative(x, y) for x, y in pairs if x is not None]  # type: ignore
            passed &= max(errors) < 5e-3
            title = (size, "causal" if causal else "full", "ordered" if deterministic else "")
            print(*title, *(f"{error:.1e}" for error in errors), flush=True)
    return passed


def races() -> bool:
    return all(repeats(size) for size in "ACW")


def repeats(size: str) -> bool:
    call, grad = full_size(size, causal=True)
    output, lse = hopper.forward(call, None)
    first = hopper.backward(call, None, output, lse, grad, ALL, False)
    passed = True
    for _ in range(100):
        again, lse_again = hopper.forward(call, None)
        grads = hopper.backward(call, None, output, lse, grad, ALL, False)
        pairs = ((output, again), (lse, lse_again), (first.query, grads.query))
        passed &= all(torch.equal(x, y) for x, y in pairs)  # type: ignore
        if size == "W":  # Added up in a fixed order.
            passed &= torch.equal(first.local_kv, grads.local_kv)  # type: ignore
            continue
        sums_of = ((first.local_kv, grads.local_kv), (first.sparse_kv, grads.sparse_kv))
        passed &= all(relative(x, y) < 1e-3 for x, y in sums_of)  # type: ignore
    return passed


def times() -> bool:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, time.strftime("%Y-%m-%d"))
    clock = clock_for(torch.device("cuda"), flush_l2=True)
    for size in SIZES:
        tokens, heads, slots, _, head_dim = SIZES[size]
        for causal in (False,) if size == "W" else (False, True):
            call, grad = full_size(size, causal)
            output, lse = hopper.forward(call, None)
            runs = {
                "forward": lambda call=call: hopper.forward(call, None),
                "backward": lambda call=call, output=output, lse=lse, grad=grad: hopper.backward(
                    call, None, output, lse, grad, ALL, False
                ),
            }
            for name, samples in time_interleaved(runs, clock, Effort()).items():
                found = spread([sample.elapsed for sample in samples])
                products = 2 if name == "forward" else 5
                flops = 2 * products * tokens * heads * head_dim * (128 + slots)
                print(
                    f"{size} {'causal' if causal else 'full':6} {name:8} {found.median:.3f} ms "
                    f"(IQR {found.iqr:.3f}) {flops / found.median / 1e9:.0f} TFLOP/s",
                    flush=True,
                )
    return True


PARTS = {"cases": cases, "sums": sums, "races": races, "times": times}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--here"]:
        return 0 if PARTS[arguments[1]]() else 1
    failed = 0
    for part in arguments or PARTS:
        command = [sys.executable, "-u", __file__, "--here", part]
        try:
            code = subprocess.run(command, timeout=SECONDS[part]).returncode
            verdict = "failed" if code else "passed"
        except subprocess.TimeoutExpired:
            verdict = f"cut off after {SECONDS[part]} s"
        print(f"{part}: {verdict}", flush=True)
        failed += verdict != "passed"
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
