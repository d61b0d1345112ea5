"""Check the portable Triton kernels on a GPU at V4's shapes, and time them and their tiles.

    python tests/gpu/portable_triton.py [--json FILE] [--skip compile,cases,shapes,times]

Parity is against float64 on the GPU, every row of every gradient. Times are medians of CUDA
events in milliseconds. Shapes are A, B and C of docs/performance.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from csa_backend_triton import key_gradient, sink_gradient
from csa_backend_triton.launching import compile_only
from csa_backend_triton.operands import operands_of
from csa_backend_triton.pool_rows import PoolRows, slot_order
from csa_backend_triton.portable_backward import backward
from csa_backend_triton.portable_forward import forward
from csa_backend_triton.stored_scores import allocate
from csa_backend_triton.tile_table import SlotTile, Tile, WindowTile
from csa_backend_triton.upstream import Upstream, token_gradient
from csa_backend_triton.warmup import meta_call
from csa_backend_triton.window_rows import WindowRows
from torch import Tensor

from csa_dispatch.call import Call, Kind, token_bounds
from csa_dispatch.call_spec import CallSpec

ALL = (True, True, True, True)


class Shape(NamedTuple):
    """One call's sizes; ``selection`` is causal, full or messy (see ``draw``)."""

    kind: str = "gather"
    tokens: int = 4096
    heads: int = 64
    head_dim: int = 512
    window: int = 128
    slots: int = 512
    pool: int = 1024
    ratio: int = 4
    dtype: str = "bfloat16"
    packed: bool = False
    selection: str = "causal"


SHAPES = {
    "A": Shape(),
    "B": Shape(tokens=8192, heads=128, slots=1024, pool=2048),
    "C": Shape(head_dim=128, slots=128),
    "H16": Shape(heads=16),
    "H8": Shape(heads=8),
    "window": Shape("window"),
    "dense": Shape("dense", tokens=65536, pool=512, ratio=128),
}


def draw(shape: Shape, device: str, seed: int = 0) -> tuple[Call, Tensor]:
    """A call and an upstream gradient.

    causal: distinct rows before (t + 1) // ratio, then -1. messy: besides, -1 and out-of-range
    slots anywhere, repeated slots, NaN in every row nobody selects.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    tokens, heads, head_dim, pool = shape.tokens, shape.heads, shape.head_dim, shape.pool
    query, local = normal(1, heads, tokens, head_dim), normal(1, 1, tokens, head_dim)
    sparse = None if shape.kind == "window" else normal(1, 1, pool, head_dim)
    upstream = normal(1, heads, tokens, head_dim)
    sink = torch.randn(heads, generator=generator, device=device)
    offsets = offsets_k = indices = None
    if shape.packed:
        cuts = [0, 1, tokens // 3 + 5, tokens // 3 + 5, tokens - 7]
        offsets = torch.tensor(cuts, dtype=torch.int32, device=device)
        if sparse is not None:
            offsets_k = (offsets * pool // tokens).to(torch.int32)
    if shape.kind == "gather":
        limit = (torch.arange(tokens, device=device) + 1) // shape.ratio
        if shape.selection == "full":
            limit = torch.full_like(limit, pool)
        order = torch.rand(tokens, pool, generator=generator, device=device)
        order.masked_fill_(torch.arange(pool, device=device) >= limit[:, None], 2.0)
        value, chosen = order.topk(min(shape.slots, pool), dim=1, largest=False)
        indices = torch.where(value < 1.5, chosen, -1)
        if shape.selection == "messy":
            dice = torch.rand(tokens, indices.shape[1], generator=generator, device=device)
            indices = torch.where(dice > 0.9, indices.roll(1, 1), indices)
            indices = torch.where(dice < 0.1, -1, indices)
            indices = torch.where((dice > 0.1) & (dice < 0.13), pool + 5, indices)
            # Packed documents end before the pool's last row.
            unread = pool - 1 if shape.packed else 3
            if not shape.packed:
                indices[indices == unread] = -1
            assert sparse is not None
            sparse[:, :, unread] = float("nan")
        indices = indices.to(torch.int32)[None].contiguous()
    ratio = shape.ratio if shape.kind == "dense" else None
    scale = head_dim**-0.5
    call = Call(
        query, local, sparse, indices, sink, offsets, offsets_k, None, shape.window, ratio, scale
    )
    return call, upstream


def described(shape: Shape) -> CallSpec:
    """The call's metadata alone."""
    return CallSpec(
        kind=Kind.DENSE if shape.kind == "dense" else Kind(shape.kind),
        dtype=shape.dtype,
        heads=shape.heads,
        tokens=shape.tokens,
        head_dim=shape.head_dim,
        pool=shape.pool,
        slots=shape.slots,
        window=shape.window,
        compress_ratio=shape.ratio if shape.kind == "dense" else 0,
        documents="cu_seqlens" if shape.packed else "none",
    )


def visible_keys(call: Call, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Rows of local + pool (the window's first) that tokens ``first .. end - 1`` see, and which
    are real."""
    tokens, window = call.query.shape[2], call.sliding_window_size
    device = call.query.device
    bounds = token_bounds(call)
    token = torch.arange(first, end, device=device)
    start = torch.zeros_like(token) if bounds is None else bounds.window_start[0, first:end]
    local = token[:, None] - torch.arange(window, device=device)
    real = local >= start[:, None]
    if call.sparse_kv is None:
        return torch.where(real, local, 0), real
    pool = call.sparse_kv.shape[2]
    low = torch.zeros_like(token) if bounds is None else bounds.pool_start[0, first:end]
    high = torch.full_like(token, pool) if bounds is None else bounds.pool_end[0, first:end]
    if call.kv_indices is None:
        chosen = torch.arange(pool, device=device).expand(end - first, -1)
        used = (chosen >= low[:, None]) & (chosen < high[:, None])
    else:
        slot = call.kv_indices[0, first:end].long()
        used = (slot >= 0) & (slot < (high - low)[:, None])
        chosen = slot + low[:, None]
    rows = torch.cat([local, chosen + tokens], 1)
    real = torch.cat([real, used], 1)
    return torch.where(real, rows, 0), real


def reference(call: Call, upstream: Tensor, chunk: int = 32) -> dict[str, Tensor]:
    """Output, lse and gradients in float64."""
    query = call.query[0].transpose(0, 1)
    tokens, heads, head_dim = query.shape
    parts = [call.local_kv[0, 0]]
    if call.sparse_kv is not None:
        parts.append(call.sparse_kv[0, 0])
    kv = torch.cat(parts).double()
    grad_kv = torch.zeros_like(kv)
    sink = call.attention_sink.double()
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64, device=kv.device)
    lse = torch.empty(tokens, heads, dtype=torch.float64, device=kv.device)
    grad_query, grad_sink = torch.empty_like(out), torch.zeros_like(sink)
    for first in range(0, tokens, chunk):
        end = min(first + chunk, tokens)
        rows, real = visible_keys(call, first, end)
        keys = kv[rows].masked_fill(~real[..., None], 0)
        q, do = query[first:end].double(), upstream[0, :, first:end].transpose(0, 1).double()
        score = torch.einsum("thd,tkd->thk", q, keys) * call.scale
        score = score.masked_fill(~real[:, None], float("-inf"))
        total = torch.logaddexp(score.logsumexp(2), sink)
        p = torch.exp(score - total[..., None])
        o = torch.einsum("thk,tkd->thd", p, keys)
        delta = (o * do).sum(2, keepdim=True)
        ds = p * (torch.einsum("thd,tkd->thk", do, keys) - delta) * call.scale
        out[first:end], lse[first:end] = o, total
        grad_query[first:end] = torch.einsum("thk,tkd->thd", ds, keys)
        grad = torch.einsum("thk,thd->tkd", p, do) + torch.einsum("thk,thd->tkd", ds, q)
        grad_kv.index_add_(0, rows.flatten(), (grad * real[..., None]).flatten(0, 1))
        grad_sink -= (torch.exp(sink - total) * delta[..., 0]).sum(0)
    found = {
        "out": out.transpose(0, 1),
        "lse": lse.transpose(0, 1),
        "dq": grad_query.transpose(0, 1),
        "dlocal": grad_kv[:tokens],
        "dsink": grad_sink,
    }
    if call.sparse_kv is not None:
        found["dpool"] = grad_kv[tokens:]
    return found


def check(name: str, shape: Shape, device: str, deterministic: bool = False) -> dict[str, Any]:
    """Relative Frobenius errors of one shape; NaN anywhere shows as nan."""
    call, upstream = draw(shape, device, seed=1)
    bounds = token_bounds(call)
    wanted = reference(call, upstream)
    out, lse = forward(call, bounds)
    found = backward(call, bounds, out, lse, upstream, ALL, deterministic)
    actual = {
        "out": out[0],
        "lse": lse[0],
        "dq": found.query[0],
        "dlocal": found.local_kv[0, 0],
        "dsink": found.attention_sink,
    }
    if found.sparse_kv is not None:
        actual["dpool"] = found.sparse_kv[0, 0]
    errors = {
        key: float((actual[key].double() - value).norm() / value.norm().clamp(min=1e-30))
        for key, value in wanted.items()
    }
    again = backward(call, bounds, out, lse, upstream, ALL, deterministic)
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)
    return {"check": name, "deterministic": deterministic, "repeats": same, **errors}


class Bench(NamedTuple):
    """One timed piece: builds a function to run on a drawn call, and its tile candidates."""

    name: str
    shape: Shape
    piece: str
    tiles: tuple[Any, ...] = (None,)


def pieces(call: Call, upstream_grad: Tensor, piece: str, tile: Any) -> Callable[[], object]:
    """A function that runs one piece of the work (``Bench.piece``)."""
    bounds = token_bounds(call)
    if piece == "forward":
        return lambda: forward(call, bounds, tile)
    query = call.query
    if query.is_meta:
        out, lse = torch.empty_like(query), torch.empty(query.shape[:3], device="meta")
    else:
        out, lse = forward(call, bounds)
    if piece in ("backward", "deterministic"):
        deterministic = piece == "deterministic"
        needs = (True, True, call.sparse_kv is not None, True)
        return lambda: backward(call, bounds, out, lse, upstream_grad, needs, deterministic)
    operands = operands_of(call, bounds)
    upstream = Upstream(operands, out, lse, upstream_grad, torch.empty_like(lse))
    grad_query = torch.empty_like(query)
    if piece == "delta":
        return lambda: token_gradient(upstream, None)
    if piece == "token":
        return lambda: token_gradient(upstream, grad_query, tile=tile)
    if piece == "key":
        dense = call.kind is Kind.DENSE
        function = key_gradient.dense_gradient if dense else key_gradient.window_gradient
        token_gradient(upstream, None)
        return lambda: function(upstream, tile)
    if piece == "sink":
        return lambda: sink_gradient.sink_gradient(upstream, call.attention_sink)
    # The rest work on stored scores: all tokens in one chunk, however much that takes.
    tokens = query.shape[2]
    window = piece.startswith("window") or piece == "token-all"
    slots = call.kind is Kind.GATHER and not piece.startswith("window")
    stored = allocate(operands, window, slots, False, 1 << 40)
    if piece in ("token-window", "token-slots", "token-all", "window-token"):
        return lambda: token_gradient(upstream, grad_query, stored, 0, tokens, tile)
    token_gradient(upstream, grad_query, stored, 0, tokens)
    if piece == "window":
        return lambda: WindowRows(upstream, stored, tile).advance(tokens)
    if piece == "order":
        return lambda: slot_order(operands, 0, tokens, 1)
    if piece in ("slots", "slots-ordered"):
        rows = PoolRows(upstream, stored, piece == "slots", tile)
        return lambda: rows.add(0, tokens)
    raise ValueError(piece)


A, C, H16, WINDOW = SHAPES["A"], SHAPES["C"], SHAPES["H16"], SHAPES["window"]
BENCHES = (
    Bench("C", C, "forward", (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 128, 4, 2),
                              Tile(64, 32, 4, 4), Tile(64, 128, 8, 2))),
    Bench("window", WINDOW, "forward", (Tile(64, 64, 8, 2), Tile(64, 64, 8, 1),
                                        Tile(64, 32, 8, 2), Tile(64, 128, 8, 1),
                                        Tile(32, 32, 4, 2), Tile(32, 64, 4, 1))),
    Bench("H16", H16, "forward", (Tile(16, 64, 4, 2), Tile(16, 32, 4, 3), Tile(16, 32, 4, 2),
                                  Tile(16, 64, 8, 2), Tile(16, 32, 8, 3), Tile(16, 128, 8, 1))),
    Bench("H8", SHAPES["H8"], "forward"),
    Bench("A", A, "forward", (Tile(64, 64, 8, 2), Tile(64, 32, 8, 3), Tile(64, 64, 8, 1))),
    Bench("dense", SHAPES["dense"], "forward", (Tile(64, 64, 8, 2), Tile(64, 32, 8, 3))),
    Bench("C", C, "token-slots", (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(64, 32, 4, 3),
                                  Tile(64, 64, 4, 1))),
    Bench("C", C, "token-all", (Tile(64, 64, 4, 2),)),
    Bench("C", C, "slots", (SlotTile(128, 64, 64, 4, 2), SlotTile(128, 64, 32, 4, 3),
                            SlotTile(128, 64, 64, 8, 2), SlotTile(128, 64, 128, 8, 1))),
    Bench("C", C, "key", (Tile(64, 64, 4, 2), Tile(32, 64, 4, 3), Tile(64, 64, 8, 2),
                          Tile(64, 128, 8, 2))),
    Bench("C", C, "window", (WindowTile(128, 64, 4, 3), WindowTile(128, 64, 4, 2))),
    Bench("window", WINDOW, "token", (Tile(64, 32, 8, 2), Tile(64, 64, 8, 1), Tile(64, 32, 8, 1),
                                      Tile(32, 32, 4, 2), Tile(32, 32, 8, 2))),
    Bench("window", WINDOW, "window-token", (Tile(64, 32, 8, 2), Tile(64, 64, 8, 1))),
    Bench("window", WINDOW, "window", (WindowTile(256, 64, 8, 2), WindowTile(128, 64, 4, 3),
                                       WindowTile(128, 64, 8, 3), WindowTile(256, 64, 4, 2))),
    Bench("window", WINDOW, "key", (Tile(64, 32, 8, 1), Tile(32, 64, 8, 2))),
    Bench("H16", H16, "token-all", (Tile(16, 32, 4, 2), Tile(16, 64, 4, 1), Tile(16, 64, 8, 1),
                                    Tile(16, 32, 4, 1))),
    Bench("H16", H16, "slots", (SlotTile(128, 16, 64, 4, 2), SlotTile(128, 16, 128, 4, 2),
                                SlotTile(256, 16, 64, 4, 2), SlotTile(256, 16, 64, 8, 2))),
    Bench("H16", H16, "window", (WindowTile(256, 16, 8, 2), WindowTile(128, 16, 4, 3))),
    Bench("A", A, "token-all", (Tile(64, 32, 8, 2), Tile(64, 64, 8, 1), Tile(64, 32, 8, 1))),
    Bench("A", A, "slots", (SlotTile(128, 64, 64, 4, 2), SlotTile(256, 64, 64, 8, 2))),
    Bench("A", A, "slots-ordered", (SlotTile(128, 64, 64, 4, 2), SlotTile(256, 64, 64, 8, 2))),
    Bench("A", A, "order"),
    Bench("A", A, "sink"),
    Bench("dense", SHAPES["dense"], "key", (Tile(64, 32, 8, 1), Tile(32, 64, 8, 2))),
    Bench("C", C, "backward"),
    Bench("window", WINDOW, "backward"),
    Bench("H16", H16, "backward"),
    Bench("A", A, "backward"),
    Bench("A", A, "deterministic"),
    Bench("C", C, "deterministic"),
)  # fmt: skip

CHECKS = (
    ("A messy", A._replace(selection="messy"), False),
    ("A packed, deterministic", A._replace(selection="messy", packed=True), True),
    ("B", SHAPES["B"]._replace(tokens=2048, selection="messy"), False),
    ("C messy", C._replace(selection="messy"), False),
    ("C fp16", C._replace(selection="messy", dtype="float16"), False),
    ("C fp32", C._replace(tokens=512, heads=16, dtype="float32"), False),
    ("H16", H16._replace(selection="messy"), False),
    ("H31 packed", A._replace(heads=31, tokens=1024, selection="messy", packed=True), True),
    ("window packed", WINDOW._replace(packed=True), False),
    ("window H5 D80", WINDOW._replace(heads=5, head_dim=80, packed=True), False),
    ("window H5 D64", WINDOW._replace(heads=5, head_dim=64), False),
    ("dense packed", Shape("dense", tokens=2048, packed=True), False),
    ("dense H12 D576 fp16", Shape("dense", 1024, 12, 576, dtype="float16"), False),
    ("dense H4 D96", Shape("dense", 1024, 4, 96), False),
)


def compile_bench(job: tuple[str, Shape, Any]) -> str | None:
    """Compile one piece with one tile (in a worker process); the error, if any."""
    piece, shape, tile = job
    try:
        with compile_only(90):
            call = meta_call(described(shape))
            pieces(call, call.query, piece, tile)()
    except Exception as error:
        return f"{piece} {tile}: {type(error).__name__}: {str(error)[:160]}"
    return None


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median milliseconds."""
    for _ in range(2):
        function()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="")
    parser.add_argument("--skip", default="")
    parser.add_argument("--check", default="", help="only checks whose name holds this")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=300.0, help="start nothing after this")
    arguments = parser.parse_args()
    skipped, began = arguments.skip.split(","), time.monotonic()
    results: list[dict[str, Any]] = []

    def report(item: dict[str, Any]) -> None:
        results.append(item)
        text = " ".join(
            f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in item.items()
        )
        print(f"[{time.monotonic() - began:5.0f}s] {text}", flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(results, file, indent=1)

    if "compile" not in skipped:
        jobs = [(bench.piece, bench.shape, tile) for bench in BENCHES for tile in bench.tiles]
        jobs += [
            (piece, shape, None)
            for _, shape, deterministic in CHECKS
            for piece in ("forward", "deterministic" if deterministic else "backward")
        ]
        pool = ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"))
        for error in pool.map(compile_bench, jobs):
            if error:
                report({"compile": error})
        pool.shutdown()
        report({"compiled": len(jobs)})
    if "shapes" not in skipped:
        for name, shape, deterministic in CHECKS:
            if arguments.check not in name:
                continue
            try:
                report(check(name, shape, "cuda", deterministic))
            except Exception as error:
                report({"check": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
    if "times" not in skipped:
        drawn = functools.lru_cache(maxsize=1)(lambda shape: draw(shape, "cuda"))
        for bench in BENCHES:
            for tile in bench.tiles:
                if time.monotonic() - began > arguments.seconds:
                    continue
                title = {"time": bench.name, "piece": bench.piece, "tile": tile and tuple(tile)}
                try:
                    function = pieces(*drawn(bench.shape), bench.piece, tile)
                    report({**title, "ms": timed(function, 12)})
                except Exception as error:
                    report({**title, "error": f"{type(error).__name__}: {str(error)[:160]}"})
                    if "CUDA error" in str(error):
                        os._exit(1)


if __name__ == "__main__":
    main()
