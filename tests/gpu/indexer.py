"""Check the lightning indexer's backends on a GPU, and time them at DeepSeek-V4's sizes.

    python tests/gpu/indexer.py [--json FILE] [--only PARTS] [--backends NAMES]

PARTS are of ties, steps, conformance, times, samples, cases, tiles, select, top_k; NAMES of the
backends below that are here. Times are medians of CUDA events in milliseconds, the L2 cache
flushed between runs. Every timed call is bf16 with H=64, D=128, ratio 4 and topk 512; weights are
bf16, which Attention Gym needs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from csa_backend_triton.indexer import ScoreTile, pick_entries
from csa_backend_triton.indexer_kernel import select_kernel
from triton.testing import do_bench

from csa_dispatch import BackendRefused, IndexerCall, IndexerSpec, backends
from csa_dispatch.call_spec import device_capability
from csa_dispatch.testing import check_backend
from csa_dispatch.testing.indexer import (
    TIES,
    IndexerCase,
    build_indexer,
    first_of_equals,
    indexer_cases,
    indexer_run,
    judge_picks,
    visible_rows,
)

BACKENDS = ["triton", "attention_gym", "eager", "cudnn"]
"""Those that are asked for and here."""
TILES = (
    (128, 128, 8, 3),
    (128, 128, 8, 2),
    (64, 128, 4, 3),
    (128, 64, 4, 3),
    (128, 256, 8, 2),
)


def draw(tokens: int, documents: int = 1, past: int = 0) -> IndexerCall:
    """A call of V4-Flash's indexer; several documents of unequal lengths when packed."""
    torch.manual_seed(tokens)
    offsets = offsets_k = None
    pool = (past + tokens) // 4
    if documents > 1:
        ends = torch.randperm(tokens - 1)[: documents - 1].sort().values + 1
        edges = torch.cat((ends.new_zeros(1), ends, ends.new_tensor([tokens])))
        offsets_k = torch.cat((ends.new_zeros(1), (edges.diff() // 4).cumsum(0)))
        offsets, offsets_k = edges.int().cuda(), offsets_k.int().cuda()
    query = torch.randn(1, tokens, 64, 128, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, pool, 128, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(1, tokens, 64, device="cuda").to(torch.bfloat16)
    return IndexerCall(query.transpose(1, 2), keys, weights, 512, 4, past, offsets, offsets_k)


def cases() -> dict[str, Any]:
    """Every case on every backend: largest share of budget, refusals and faults."""
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        shares, refused, faults = [], 0, []
        for case in indexer_cases(("float32", "bfloat16", "float16")):
            call = build_indexer(case, "cuda")
            try:
                picks = indexer_run(backend)(call)
            except BackendRefused:
                refused += 1
                continue
            verdict = judge_picks(build_indexer(case), picks.cpu())
            print(backend, case.name, verdict.message or f"{verdict.share:.3f}", flush=True)
            shares.append(verdict.share)
            if verdict.message:
                faults.append(f"{case.name}: {verdict.message}")
        found[backend] = {"passed": len(shares) - len(faults), "refused": refused}
        found[backend] |= {"share": max(shares, default=0.0), "faults": faults}
    return found


def samples() -> dict[str, Any]:
    """V4's sizes, some tokens of each, by the oracle; equal picks of two runs."""
    found: dict[str, Any] = {}
    sizes = ((4096, 1, 0), (16384, 1, 0), (65536, 1, 0), (16384, 9, 0), (256, 1, 2**18))
    for tokens, documents, past in sizes:
        call = draw(tokens, documents, past)
        on_host = IndexerCall(
            *(item.cpu() if isinstance(item, torch.Tensor) else item for item in call)
        )
        some = [*range(0, tokens, tokens // 12), tokens - 1]
        for backend in BACKENDS:
            if past and backend == "attention_gym":  # it has no past
                continue
            picks = indexer_run(backend)(call)
            again = bool(torch.equal(picks, indexer_run(backend)(call)))
            verdict = judge_picks(on_host, picks.cpu(), some)
            counts = [min(512, len(visible_rows(on_host, token))) for token in some]
            found[f"{backend} T={tokens} documents={documents} past={past}"] = {
                "share": verdict.share,
                "loss": verdict.error,
                "fault": verdict.message,
                "picks": sum(counts),
                "repeats": again,
            }
    return found


def ties() -> dict[str, Any]:
    """Whether of equal scores the lowest are picked; calls with exact scores, by backend."""
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        row = backends()[backend].backend
        assert row is not None
        implementation = row.operations["lightning_indexer"]
        right, wrong, refused = 0, [], 0
        for case in TIES:
            for shape in ({}, {"heads": 16, "head_dim": 128}):
                for dtype in ("float32", "bfloat16"):
                    changed = replace(case, dtype=dtype, weights_dtype=dtype, **shape)
                    if implementation.forward_capabilities.reasons(spec_on_card(changed)):
                        refused += 1
                        continue
                    picks = indexer_run(backend)(build_indexer(changed, "cuda")).cpu()
                    wanted = first_of_equals(build_indexer(changed))
                    if torch.equal(picks.sort(-1).values, wanted.sort(-1).values):
                        right += 1
                    else:
                        wrong.append(f"{case.name} {dtype} {shape}")
        found[backend] = {"lowest": right, "others": wrong, "refused": refused}
    # Products that round to -0.0 or 0.0.
    keys = torch.zeros(1, 4096, 16, device="cuda")
    keys[:, ::3, 0] = 1e-30
    query = torch.zeros(1, 1, 1, 16, device="cuda")
    query[..., 0] = 1
    weights = torch.full((1, 1, 1), -1e-30, device="cuda")
    call = IndexerCall(query, keys, weights, 7, 1, 4095, None, None)
    for backend in {"triton", "eager"} & {*BACKENDS}:
        found[f"{backend} of zeros"] = indexer_run(backend)(call)[0, 0].tolist()
    return found


def spec_on_card(case: IndexerCase) -> IndexerSpec:
    return case.spec("cuda", device_capability(torch.device("cuda", 0)))


def steps() -> dict[str, Any]:
    """Single tokens against the whole sequence: tokens whose picks differ, and how many picks."""
    found: dict[str, Any] = {}
    call = draw(8192)
    tokens = range(2047, 8192, 97)
    for backend in BACKENDS:
        if backend == "attention_gym":  # it has no past
            continue
        whole = indexer_run(backend)(call)[0].sort(-1).values
        differ = picks = 0
        for token in tokens:
            step = call._replace(
                index_query=call.index_query[:, :, token : token + 1],
                weights=call.weights[:, token : token + 1],
                index_keys=call.index_keys[:, : (token + 1) // 4],
                past=token,
            )
            one = indexer_run(backend)(step)[0, 0]
            missing = int((~torch.isin(one, whole[token])).sum())
            differ, picks = differ + (missing > 0), picks + missing
        found[backend] = {"tokens": len(tokens), "differ": differ, "picks": picks}
    return found


def conformance() -> dict[str, Any]:
    """Claims, results, memory, receipts, determinism and waiting, by the conformance kit."""
    found: dict[str, Any] = {}
    for name in BACKENDS:
        backend = backends()[name].backend
        assert backend is not None
        report = check_backend(backend, "cuda", checks=["operations", "lightning_indexer"])
        print(report, flush=True)
        found[name] = {check.name: check.status for check in report.checks}
        found[name]["message"] = "; ".join(check.message for check in report.failures)
    return found


def top_k() -> dict[str, float]:
    """cuDNN's top-k alone, 1280 rows: milliseconds by columns and by how equals are taken."""
    if "cudnn" not in BACKENDS:
        return {}
    from csa_backend_cudnn.entry_points import indexer_entry_points

    select = indexer_entry_points().top_k
    found: dict[str, float] = {}
    for columns in (1024, 4096, 16384):
        scores = torch.randn(1280, columns, device="cuda")
        lengths = torch.full((1280,), columns, dtype=torch.int32, device="cuda")
        for options in ({}, {"tie_break": 1}, {"deterministic": True}):
            run = partial(select, scores, lengths, 512, return_val=False, **options)
            found[f"{columns} {options}"] = milliseconds(run, 40)
    return found


def milliseconds(run: Callable[[], object], budget: int = 150) -> float:
    return do_bench(run, warmup=budget // 4, rep=budget, return_mode="median")


def times() -> dict[str, Any]:
    """Milliseconds and peak bytes above the inputs and picks, by backend and length."""
    found: dict[str, Any] = {}
    for tokens in (4096, 16384, 65536):
        call = draw(tokens)
        for backend in BACKENDS:
            run = indexer_run(backend)
            run(call)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            picks = run(call)
            peak = torch.cuda.max_memory_allocated() - before - picks.nbytes
            found[f"{backend} T={tokens}"] = {
                "ms": milliseconds(partial(run, call)),
                "peak_mib": peak / 2**20,
            }
    return found


def tiles() -> dict[str, float]:
    """Tiles of the score kernel at T=16384: milliseconds of the whole call."""
    call = draw(16384)
    found: dict[str, float] = {}
    for values in TILES:
        tile = ScoreTile(*values)
        try:
            found[str(values)] = milliseconds(partial(pick_entries, call, tile))
        except Exception as error:
            found[f"{values}: {type(error).__name__}"] = float("nan")
    return found


def select() -> dict[str, float]:
    """Picks alone from scores that exist, by longest row and warps: milliseconds of 4096 rows."""
    found: dict[str, float] = {}
    rows = 4096
    for longest, several in ((4096, (4, 8, 16)), (16384, (8, 16, 32))):
        scores = torch.randn(rows, longest, device="cuda")
        start = torch.zeros(1, rows, dtype=torch.int32, device="cuda")
        end = torch.full_like(start, longest)
        picks = torch.empty(1, rows, 512, dtype=torch.int32, device="cuda")
        strides = (*start.stride(), *end.stride(), picks.stride(0))
        found[f"torch.topk {longest}"] = milliseconds(partial(scores.topk, 512, 1), 40)
        for warps in several:
            run = partial(
                select_kernel[(rows, 1)],
                *(scores, start, end, picks, *strides, longest, 0, 512),
                BLOCK=longest,
                RESIDENT=True,
                num_warps=warps,
            )
            found[f"{longest} warps={warps}"] = milliseconds(run, 40)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    parser.add_argument("--backends", default="")
    options = parser.parse_args()
    asked = options.backends.split(",") if options.backends else BACKENDS
    BACKENDS[:] = [name for name in BACKENDS if name in asked and backends()[name].available]
    print("backends:", *BACKENDS, flush=True)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    parts = (ties, steps, conformance, times, samples, cases, tiles, select, top_k)
    for part in parts:
        if options.only and part.__name__ not in options.only.split(","):
            continue
        found[part.__name__] = part()
        print(part.__name__, json.dumps(found[part.__name__], indent=1), flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
