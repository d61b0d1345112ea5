"""Check the compressor's Triton kernels on a GPU, and time them at V4's sizes.

    python tests/gpu/compressor.py [--json FILE] [--skip cases,shapes,times,tiles,loss]

Times are medians of CUDA events in milliseconds, the L2 cache flushed between runs. "plain" is
the definition in PyTorch operations, in fp32, differentiated by autograd.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from csa_backend_eager.compressor import EagerCompressor
from csa_backend_triton import compressor_launch
from csa_backend_triton.compressor import TritonCompressor
from torch import Tensor
from triton.testing import do_bench

from csa_dispatch import CompressorCall
from csa_dispatch.compressor_call import pool_offsets
from csa_dispatch.functional import indexer_kl_loss
from csa_dispatch.testing.compressor import compressor_shares

ALL = (True, True, True)
V4 = [(ratio, tokens) for ratio in (4, 128) for tokens in (4096, 16384)]


def draw(
    ratio: int,
    tokens: int,
    *,
    overlapping: bool,
    head_dim: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    offsets: list[int] | None = None,
    batch: int = 1,
) -> tuple[CompressorCall, Tensor]:
    """A call whose values and gates are halves of one projection, and an upstream gradient."""
    channels = head_dim * (2 if overlapping else 1)
    fused = torch.randn(batch, tokens, 2 * channels, device="cuda").to(dtype)
    bias = torch.randn(ratio, channels, device="cuda")
    cu_seqlens = cu_seqlens_k = None
    if offsets is not None:
        fused[:, offsets[-1] :] = math.nan
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        cu_seqlens_k = pool_offsets(cu_seqlens, ratio)
    call = CompressorCall(*fused.chunk(2, -1), bias, ratio, overlapping, cu_seqlens, cu_seqlens_k)
    grad = torch.randn(batch, call.entries, head_dim, device="cuda").to(dtype)
    if offsets is not None:
        used = sum((end - start) // ratio for start, end in pairwise(offsets))
        grad[:, used:] = math.nan
    return call, grad


def cases() -> dict[str, Any]:
    """Every result of small calls against the float64 oracle: share of budget used."""
    triton, found = TritonCompressor(), {}
    packed = [0, 5, 5, 8, 300, 301, 560]
    calls = {
        "overlapping": draw(4, 515, overlapping=True),
        "overlapping packed": draw(4, 600, overlapping=True, offsets=packed),
        "overlapping fp32": draw(4, 130, overlapping=True, dtype=torch.float32, batch=2),
        "plain": draw(128, 900, overlapping=False),
        "plain packed fp16": draw(
            128, 1300, overlapping=False, dtype=torch.float16, offsets=[0, 127, 600, 1200]
        ),
        "odd": draw(3, 100, overlapping=True, head_dim=80),
        "largest": draw(256, 1100, overlapping=True, head_dim=64),
    }
    for name, (call, grad) in calls.items():
        entries = triton.forward(call)
        shares = compressor_shares(call, (entries, *triton.backward(call, grad, ALL)), grad)
        again = triton.backward(call, grad, ALL)
        repeats = all(
            torch.equal(one, other)
            for one, other in zip(again, triton.backward(call, grad, ALL), strict=True)
        )
        found[name] = {**shares, "repeats": repeats}
        print(name, found[name], flush=True)
    return found


def shapes() -> dict[str, Any]:
    """V4's sizes: relative error of each result against eager in float64, and of one rounding."""
    found = {}
    for ratio, tokens in V4:
        call, grad = draw(ratio, tokens, overlapping=ratio == 4)
        wide = call._replace(
            values=call.values.double(),
            gates=call.gates.double(),
            position_bias=call.position_bias.double(),
        )
        eager, triton = EagerCompressor(), TritonCompressor()
        exact = (eager.forward(wide), *eager.backward(wide, grad.double(), ALL))
        results = {}
        for name, backend in (("triton", triton), ("eager", eager)):
            made = (backend.forward(call), *backend.backward(call, grad, ALL))
            results[name] = [
                float((a.double() - r).norm() / r.norm()) for a, r in zip(made, exact, strict=True)
            ]
        dtypes = (torch.bfloat16,) * 3 + (torch.float32,)
        results["rounding"] = [
            float((r.to(dtype).double() - r).norm() / r.norm())
            for r, dtype in zip(exact, dtypes, strict=True)
        ]
        found[f"r{ratio} T{tokens}"] = results
        print(ratio, tokens, json.dumps(results), flush=True)
    return found


def plain(values: Tensor, gates: Tensor, bias: Tensor, ratio: int, overlapping: bool) -> Tensor:
    """The definition in PyTorch operations."""
    blocks = values.shape[1] // ratio
    values = values[:, : blocks * ratio].unflatten(1, (blocks, ratio)).float()
    gates = gates[:, : blocks * ratio].unflatten(1, (blocks, ratio)).float() + bias
    if overlapping:
        values, gates = (
            torch.cat((torch.cat((torch.full_like(a[:, :1], fill), a[:, :-1]), 1), b), 2)
            for (a, b), fill in ((values.chunk(2, -1), 0.0), (gates.chunk(2, -1), -math.inf))
        )
    return (gates.softmax(2) * values).sum(2).bfloat16()


def median(function: Callable[[], object]) -> float:
    return float(do_bench(function, warmup=5, rep=30, return_mode="median"))


def times() -> dict[str, Any]:
    found = {}
    for ratio, tokens in V4:
        call, grad = draw(ratio, tokens, overlapping=ratio == 4)
        row = {}
        for name, backend in (("triton", TritonCompressor()), ("eager", EagerCompressor())):
            row[f"{name} forward"] = median(partial(backend.forward, call))
            row[f"{name} backward"] = median(partial(backend.backward, call, grad, ALL))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = backend.backward(call, grad, ALL)
            peak = torch.cuda.max_memory_allocated() - before
            made = sum(item.numel() * item.element_size() for item in kept)
            row[f"{name} backward extra MiB"] = round((peak - made) / 2**20, 1)
        inputs = [item.detach().requires_grad_() for item in call[:3]]
        row["plain forward"] = median(partial(plain, *inputs, *call[3:5]))
        entries = plain(*inputs, *call[3:5])
        row["plain backward"] = median(
            partial(torch.autograd.grad, entries, inputs, grad, retain_graph=True)
        )
        moved = 2 * call.values.numel() * 2
        row["bytes at 4.8 TB/s forward"] = moved / 4.8e9
        found[f"r{ratio} T{tokens}"] = row
        print(ratio, tokens, json.dumps(row), flush=True)
    return found


def tiles() -> dict[str, Any]:
    """Times of other tiles, at T = 16384."""
    found: dict[str, Any] = {}
    original = compressor_launch.tile_of
    triton = TritonCompressor()
    for ratio in (4, 128):
        call, grad = draw(ratio, 16384, overlapping=ratio == 4)
        for columns, warps in ((128, 1), (256, 2)) if ratio == 4 else ((32, 4), (64, 8)):
            slots = original(call, backward=True).slots
            tile = compressor_launch.Tile(slots, columns, warps)
            compressor_launch.tile_of = lambda _, tile=tile, **__: tile
            row = {"forward": median(partial(triton.forward, call))}
            for rounds in (2, 4, 8, 16):
                compressor_launch.ROUNDS = rounds
                key = f"backward {rounds}"
                row[key] = median(partial(triton.backward, call, grad, ALL))
            found[f"r{ratio} {tile}"] = row
            print(ratio, tile, json.dumps(row), flush=True)
    compressor_launch.tile_of = original
    return found


def loss() -> dict[str, Any]:
    """The indexer's loss at V4-Flash's sizes: time and memory; and against float32 products."""
    found = {}
    for tokens in (4096, 16384):
        heads, size, pool, slots = 64, 512, tokens // 4, 512
        query = torch.randn(1, heads, tokens, size, device="cuda").bfloat16()
        entries = torch.randn(1, pool, size, device="cuda").bfloat16()
        index = torch.randint(-1, pool, (1, tokens, slots), device="cuda")
        lse = torch.randn(1, heads, tokens, device="cuda") + 8
        scores = torch.randn(1, tokens, slots, device="cuda", requires_grad=True)

        def step(arguments: tuple[Any, ...] = (scores, query, entries, index, lse)) -> Tensor:
            return torch.autograd.grad(indexer_kl_loss(*arguments), arguments[0])[0]

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradient = step()
        row = {
            "milliseconds": median(step),
            "extra MiB": (torch.cuda.max_memory_allocated() - before) / 2**20,
        }
        if tokens == 4096:
            wide = step((scores, query.float(), entries.float(), index, lse))
            row["gradient error"] = float((gradient - wide).norm() / wide.norm())
        found[f"T{tokens}"] = row
        print(tokens, row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--skip", default="")
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for section in (cases, shapes, times, tiles, loss):
        if section.__name__ in options.skip.split(","):
            continue
        start = time.time()
        found[section.__name__] = section()
        print(f"-- {section.__name__}: {time.time() - start:.1f} s", flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
