"""Calls past 2**31 elements and a million tokens on a GPU: sampled results, and extra memory.

    PYTHONPATH=.:backends python tests/gpu/long_calls.py [TEXT]

Each runs forward and backward. Query rows and dQ are held to the float64 oracle at four tokens,
the pool's gradient at rows whose every reader is summed in float64. The backward may take 512 MiB
beyond its results and 4 bytes a token and head, and more for a pool of millions of rows. TEXT
chooses calls by name. The largest takes 70 GB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from csa_backend_triton import backend
from torch import Tensor

from csa_dispatch.bench.inputs import BenchInputs
from csa_dispatch.bench.memory import extra_memory
from csa_dispatch.bench.modes import deterministic
from csa_dispatch.bench.sampled import SampledRows
from csa_dispatch.call import Call, Gradients

CUDA = torch.device("cuda")
MILLION = 2**20 + 5


class Long(NamedTuple):
    """Sizes of a call in bf16 with head_dim 512; no slots: window alone, or dense by ratio."""

    tokens: int
    heads: int
    pool: int = 0
    slots: int = 0
    ratio: int | None = None
    ordered: bool = False
    limit_mib: int = 512


CALLS = {
    "hopper gather": Long(200_001, 64, 50_000, 64),
    "hopper dense": Long(200_001, 64, 1_562, ratio=128),
    "gather": Long(MILLION, 8, MILLION // 4, 32),
    "gather, deterministic": Long(MILLION, 8, MILLION // 4, 32, ordered=True),
    "dense": Long(MILLION, 8, MILLION // 128, ratio=128),
    "window": Long(MILLION, 8),
    "wide pool": Long(4096, 64, 4_300_000, 64, limit_mib=1600),
}


def draw(long: Long) -> BenchInputs:
    generator = torch.Generator(CUDA).manual_seed(0)

    def rows(*shape: int) -> Tensor:
        made = torch.empty(1, *shape, 512, device=CUDA, dtype=torch.bfloat16)
        return made.normal_(generator=generator)

    indices = pool = None
    if long.pool:
        pool = rows(1, long.pool)
    if long.slots:
        shape = (1, long.tokens, long.slots)
        indices = torch.empty(shape, device=CUDA, dtype=torch.int32)
        indices.random_(-1, long.pool, generator=generator)
        # Rows that the check reads, also at the pool's end.
        indices[:, ::4099, 0] = long.pool - 1
    sink = torch.randn(long.heads, device=CUDA, generator=generator)
    query, local = rows(long.heads, long.tokens), rows(1, long.tokens)
    call = Call(query, local, pool, indices, sink, None, None, None, 128, long.ratio, 512**-0.5)
    return BenchInputs(call, rows(long.heads, long.tokens))


def row_error(inputs: BenchInputs, output: Tensor, lse: Tensor, gradient: Tensor) -> float:
    """Relative error of the gradient of some pool rows against float64 sums over their readers."""
    call, grad_output = inputs
    assert call.kv_indices is not None
    assert call.sparse_kv is not None
    worst = 0.0
    for row in (0, call.sparse_kv.shape[2] // 2, call.sparse_kv.shape[2] - 1):
        # A row chosen twice by a token counts twice.
        readers = (call.kv_indices[0] == row).nonzero()[:, 0]
        exact = torch.zeros(512, device=CUDA, dtype=torch.float64)
        key = call.sparse_kv[0, 0, row].double()
        for some in readers.split(4096):
            query, grad, out = (x[0, :, some].double() for x in (call.query, grad_output, output))
            weight = torch.exp(query @ key * call.scale - lse[0, :, some].double())
            d_score = weight * (grad @ key - (grad * out).sum(-1)) * call.scale
            exact += torch.einsum("ht,htd->d", weight, grad)
            exact += torch.einsum("ht,htd->d", d_score, query)
        worst = max(worst, float((gradient[0, 0, row].double() - exact).norm() / exact.norm()))
    return worst


def check(name: str, long: Long) -> bool:
    inputs = draw(long)
    call, grad_output = inputs
    needs = (True, True, call.sparse_kv is not None, True)
    with deterministic(False):
        sampled = SampledRows(inputs, gradients=True)
    began = time.perf_counter()
    output, lse = backend.forward(call)
    with deterministic(long.ordered):
        gradients = backend.backward(call, output, lse, grad_output, needs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        found = {"output": output, "lse": lse, "dquery": gradients[0], "dlocal_kv": gradients[1]}
        faults = [f"{v.name}: {v.message}" for v in sampled.verdicts(found) if not v.passed]
        shares = [verdict.share for verdict in sampled.verdicts(found)]
        error = 0.0
        if call.kv_indices is not None and gradients[2] is not None:
            error = row_error(inputs, output, lse, gradients[2])
        if error > 5e-3:
            faults.append(f"dsparse_kv is off by {error:.1e} of its norm")
        del gradients, found

        def run() -> Iterable[Tensor | None]:
            made: Gradients = backend.backward(call, output, lse, grad_output, needs)
            return made

        extra = extra_memory(run, CUDA) - 4 * long.tokens * long.heads
    if extra > long.limit_mib * 2**20:
        faults.append("too much memory")
    word = "fail" if faults else "pass"
    print(f"{word} {name}: {max(shares):.2f} of the budget, pool rows {error:.1e},", end=" ")
    print(f"{extra / 2**20:.0f} MiB, first run {seconds:.1f} s", *faults, flush=True)
    return not faults


def main(text: str) -> int:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    passed = True
    for name, long in CALLS.items():
        if text in name:
            passed &= check(name, long)
            torch.cuda.empty_cache()
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))
