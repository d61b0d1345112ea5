"""The indexer's kernels: every case by the oracle, blocks and long rows, compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from csa_backend_triton import indexer

from csa_dispatch import IndexerCall, visible_entries
from csa_dispatch.testing.indexer import (
    TIES,
    IndexerCase,
    build_indexer,
    first_of_equals,
    indexer_cases,
    indexer_run,
    judge_picks,
)

CASES = {case.name: case for case in indexer_cases(("float32", "bfloat16", "float16"))}
PROGRAM = Path(__file__).with_name("cross_compile_indexer.py")


def check(case: IndexerCase, device: str) -> torch.Tensor:
    picks = indexer_run("triton")(build_indexer(case, device)).cpu()
    verdict = judge_picks(build_indexer(case), picks)
    assert verdict.passed, verdict.message
    return picks


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "tiles-float32")) for name in CASES],
)
def test_picks_are_the_oracles(name: str, device: str) -> None:
    check(CASES[name], device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", TIES, ids=lambda case: case.name)
def test_of_equal_scores_the_lowest_indices_are_picked(
    case: IndexerCase, dtype: str, device: str
) -> None:
    case = replace(case, dtype=dtype)
    picks = indexer_run("triton")(build_indexer(case, device)).cpu()
    assert torch.equal(picks, first_of_equals(build_indexer(case)))


def test_negative_zero_is_equal_to_zero(device: str) -> None:
    # Products too small for fp32 may be rounded to either.
    scores = torch.zeros(40, device=device)
    scores[::3] = -0.0
    query, keys = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 40, 16, device=device)
    call = IndexerCall(query, keys, query.new_zeros(1, 1, 1), 5, 1, 39, None, None)
    start, end = visible_entries(call)
    picks = torch.empty(1, 1, 5, dtype=torch.int32, device=device)
    indexer._select(call, start, end, scores, 40, 0, 1, 40, picks)
    assert picks[0, 0].tolist() == [0, 1, 2, 3, 4]


def test_picks_ascend(device: str) -> None:
    picks = check(IndexerCase("long", tokens=40, topk=5, compress_ratio=1), device)[0]
    assert bool((picks[10:].diff(dim=-1) > 0).all())


def test_blocks_of_tokens_and_rows_too_long_to_hold(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = IndexerCase("blocks", tokens=24, past=300, compress_ratio=1, topk=33, heads=1)
    whole = check(case, device)
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", 4 * 384 * 16)
    monkeypatch.setattr(indexer, "LONGEST_RESIDENT", 256)
    assert torch.equal(check(case, device), whole)


def compiled(capability: int, *names: str) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(capability), *names],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check_means(capability: int, kernels: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in kernels} == {"score_kernel", "select_kernel"}
    for kernel in kernels:
        title = f"sm_{capability} {kernel}"
        assert kernel["shared"] <= kernel["shared_limit"], title
        assert kernel["spills"] <= 512, title
        if kernel["constants"].get("ROWS", 0) >= 64 and kernel["kernel"] == "score_kernel":
            assert capability != 90 or kernel["wgmma"], title
            assert capability not in (100, 103) or kernel["tcgen05"], title


@pytest.mark.parametrize(
    ("capability", "names"),
    [(80, ["model"]), (86, ["fp32"]), (90, ["model"]), (100, ["model"]), (120, ["decode"])],
)
def test_the_main_kernels_compile_within_their_means(capability: int, names: list[str]) -> None:
    check_means(capability, compiled(capability, *names))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_every_kernel_compiles_within_its_means(capability: int) -> None:
    check_means(capability, compiled(capability))
