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
from csa_backend_triton.compiling import meta_call
from csa_backend_triton.launching import compile_only
from csa_backend_triton.operands import operands_of
from csa_backend_triton.pool_rows import PoolRows, slot_order
from csa_backend_triton.portable_backward import backward
from csa_backend_triton.portable_forward import forward
from csa_backend_triton.stored_scores import allocate
from csa_backend_triton.tile_table import SlotTile, Tile, WindowTile
from csa_backend_triton.upstream import Upstream, token_gradient
from csa_backend_triton.window_rows import WindowRows
from portable_shapes import SHAPES, Shape, check, described, draw
from torch import Tensor

from csa_dispatch.call import Call, Kind, token_bounds


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
        rows = PoolRows(upstream, stored, piece == "slots", tile=tile)
        return lambda: rows.add(0, tokens)
    raise ValueError(piece)


A, C, H16, WINDOW = SHAPES["A"], SHAPES["C"], SHAPES["H16"], SHAPES["window"]
BENCHES = (
    Bench("C", C, "forward", (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 128, 4, 2),
                              Tile(64, 32, 4, 4), Tile(64, 128, 8, 2))),
    Bench("window", WINDOW, "forward", (Tile(64, 64, 8, 2), Tile(64, 64, 8, 1),
                                        Tile(64, 32, 8, 2), Tile(64, 128, 8, 1),
                                        Tile(32, 32, 4, 2), Tile(32, 64, 4, 1))),
    Bench("H16", H16, "forward", (Tile(16, 32, 4, 2, 128), Tile(16, 64, 4, 2), Tile(16, 32, 4, 3),
                                  Tile(16, 32, 4, 2), Tile(16, 64, 8, 2), Tile(16, 32, 8, 3))),
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
    Bench("H16", H16, "token-all", (Tile(16, 32, 4, 2, 168), Tile(16, 64, 4, 2),
                                    Tile(16, 32, 4, 2), Tile(16, 64, 8, 1))),
    Bench("H16", H16, "slots", (SlotTile(128, 16, 32, 4, 2), SlotTile(128, 16, 64, 4, 2),
                                SlotTile(256, 16, 16, 4, 2), SlotTile(256, 16, 64, 8, 2))),
    Bench("H16", H16, "window", (WindowTile(256, 16, 4, 3), WindowTile(128, 16, 4, 3))),
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
