"""The eager backend on a CPU against Attention Gym's eager reference: time and peak memory.

    python tests/benchmarks/eager_vs_reference.py [--json FILE] [--check] [--rounds N] [--short]

Forward and backward of one layer through the public calls, ``attention(backend="eager")`` and
``gather_attn(impl="reference")``, on the same tensors. Rounds of the two are interleaved and the
least time of each is taken: other load on the machine can only add. Peak memory is measured in a
process of its own, as the growth of resident memory from just before the call to the highest
point during it (Linux only); what the call returns counts too.

``--check`` exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TARGET_SPEEDUP = {"float32": 8.0, "bfloat16": 12.0}
TARGET_MEMORY_SHARE = 0.1
LONG_TOKENS = 32768


@dataclass(frozen=True)
class Shape:
    """One attention layer: sizes as everywhere in csa-dispatch."""

    heads: int = 16
    tokens: int = 2048
    head_dim: int = 128
    window: int = 128
    slots: int = 64
    pool: int = 512


class Layer:
    """The tensors of one call, and its two implementations."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.shape = shape
        self.query = draw(1, shape.heads, shape.tokens, shape.head_dim).requires_grad_()
        self.local_kv = draw(1, 1, shape.tokens, shape.head_dim).requires_grad_()
        self.sparse_kv = draw(1, 1, shape.pool, shape.head_dim).requires_grad_()
        self.sink = torch.randn(shape.heads, generator=generator).requires_grad_()
        self.grad_output = draw(1, shape.heads, shape.tokens, shape.head_dim)
        size = (1, shape.tokens, shape.slots)
        self.kv_indices = torch.randint(shape.pool, size, generator=generator)

    def eager(self) -> None:
        """Forward and backward by csa-dispatch's eager backend."""
        from csa_dispatch import attention

        self._differentiate(
            attention(*self._tensors(), sliding_window_size=self.shape.window, backend="eager")
        )

    def reference(self) -> None:
        """Forward and backward by Attention Gym's reference."""
        from attn_gym.sparse.gather_attn import gather_attn

        self._differentiate(
            gather_attn(*self._tensors(), sliding_window_size=self.shape.window, impl="reference")
        )

    def returned_bytes(self) -> int:
        """What a call must allocate in any case: output, lse and the gradients."""
        tensors = (self.query, self.query, self.local_kv, self.sparse_kv, self.sink)
        lse = 4 * self.query.numel() // self.shape.head_dim
        return lse + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.local_kv, self.sparse_kv, self.kv_indices, self.sink

    def _differentiate(self, output: Tensor | tuple[Tensor, ...]) -> None:
        assert isinstance(output, Tensor)
        output.backward(self.grad_output)
        for leaf in (self.query, self.local_kv, self.sparse_kv, self.sink):
            leaf.grad = None


def least_seconds(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Each variant's time in its quietest round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(values[1:]) for name, values in times.items()}


def peak_extra_bytes(name: str, dtype: str, tokens: int) -> int | None:
    """Growth of resident memory during one call in a fresh process; None off Linux."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--peak-of", name, dtype, str(tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _print_own_peak(name: str, dtype: str, tokens: int) -> None:
    """The other end of ``peak_extra_bytes``."""
    run = getattr(Layer(Shape(tokens=64), getattr(torch, dtype)), name)
    run()  # imports, thread pools and libraries are no part of the call's memory
    run = getattr(Layer(Shape(tokens=tokens), getattr(torch, dtype)), name)
    gc.collect()
    _give_back_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far
    before = _resident("VmRSS")
    run()
    print(_resident("VmHWM") - before)


def _give_back_free_memory() -> None:
    """So that the call cannot reuse pages that were resident before it; a glibc function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(rounds: int, *, long: bool) -> list[dict[str, Any]]:
    """One row of figures for each dtype; ``long`` adds T = 32768 on the eager backend."""
    rows: list[dict[str, Any]] = []
    for dtype, target in TARGET_SPEEDUP.items():
        layer = Layer(Shape(), getattr(torch, dtype))
        seconds = least_seconds({"eager": layer.eager, "reference": layer.reference}, rounds)
        speedup = seconds["reference"] / seconds["eager"]
        row: dict[str, Any] = {
            "dtype": dtype,
            "shape": asdict(Shape()),
            "seconds": seconds,
            "speedup": speedup,
            "met": speedup >= target,
            "returned_bytes": layer.returned_bytes(),
        }
        peaks = {name: peak_extra_bytes(name, dtype, Shape.tokens) for name in seconds}
        if peaks["eager"] is not None and peaks["reference"] is not None:
            row["peak_bytes"] = peaks
            row["memory_share"] = peaks["eager"] / peaks["reference"]
            row["met"] = row["met"] and row["memory_share"] <= TARGET_MEMORY_SHARE
        if long:
            del layer
            gc.collect()
            row["long"] = measure_long(dtype)
        rows.append(row)
    return rows


def measure_long(dtype: str) -> dict[str, Any]:
    """Time and peak memory of the eager backend at T = 32768."""
    layer = Layer(Shape(tokens=LONG_TOKENS), getattr(torch, dtype))
    return {
        "tokens": LONG_TOKENS,
        "seconds": least_seconds({"eager": layer.eager}, 1)["eager"],
        "returned_bytes": layer.returned_bytes(),
        "peak_bytes": peak_extra_bytes("eager", dtype, LONG_TOKENS),
    }


def report(row: dict[str, Any]) -> str:
    """A row in words."""
    seconds = row["seconds"]
    target = TARGET_SPEEDUP[row["dtype"]]
    lines = [
        f"{row['dtype']}: eager {seconds['eager'] * 1e3:.0f} ms, reference "
        f"{seconds['reference'] * 1e3:.0f} ms: {row['speedup']:.1f} x (target {target:g} x)"
    ]
    if "peak_bytes" in row:
        peak = row["peak_bytes"]
        lines.append(
            f"  peak extra memory {_mib(peak['eager'])}, of which {_mib(row['returned_bytes'])} "
            f"is returned; reference {_mib(peak['reference'])}: share "
            f"{row['memory_share']:.3f} (target {TARGET_MEMORY_SHARE:g})"
        )
    if "long" in row:
        long = row["long"]
        text = f"  T={long['tokens']}: eager {long['seconds']:.2f} s"
        if long["peak_bytes"] is not None:
            text += (
                f", peak extra memory {_mib(long['peak_bytes'])}, of which "
                f"{_mib(long['returned_bytes'])} is returned"
            )
        lines.append(text)
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 below a target")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--short", action="store_true", help="leave T = 32768 out")
    parser.add_argument("--peak-of", nargs=3, metavar=("NAME", "DTYPE", "T"), help="internal")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        name, dtype, tokens = arguments.peak_of
        _print_own_peak(name, dtype, int(tokens))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; forward + backward")
    print(", ".join(f"{name} {size}" for name, size in asdict(Shape()).items()))
    rows = measure(arguments.rounds, long=not arguments.short)
    for row in rows:
        print(report(row))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")
    if arguments.check and not all(row["met"] for row in rows):
        raise SystemExit("a target is missed")


if __name__ == "__main__":
    main()
