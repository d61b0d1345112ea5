"""flash-attn-4's real kernels, driven by the adapter, become machine code for both architectures.

CI lowers each head count with the sizes of V4-Flash; ``slow`` adds other kinds, dtypes, options.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from csa_backend_fa4.entry_points import availability

from tests.backends.fa4.lowering import CALLS

ROOT = Path(__file__).parents[3]
MULTIPROCESSOR = {"sm_100a": 100, "sm_103a": 103}

MANY = [f"{heads} heads" for heads in (1, 8, 64, 96, 128)]
FEW = [f"{heads} heads, few tokens" for heads in (1, 8, 64, 96, 128)]
PACKED = ["8 heads, packed", "128 heads, packed"]
IN_CI = [*MANY, *FEW, *PACKED]


FORWARD_SMALL, FORWARD_LARGE = (
    "FlashAttentionMLAForward1CtaKb64Sm100",
    "FlashAttentionMLAForwardSm100",
)
PREPROCESS, MAIN = "FlashAttentionBackwardPreprocess", "FlashAttentionSparseMLABackwardSm100"
QUERY_SMALL, QUERY_LARGE = "dQdQvGemmKernelH64", "dQdQvGemmKernel"
SINK = "DSinkReduceKernel"
WITHOUT_TENSOR_CORES = {PREPROCESS, SINK, "operands_kernel"}


def lower(arch: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What a process of its own compiled for each call, by the call's name."""
    reason = availability().reason
    if reason is not None:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.fa4.lowering", arch, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["call"]: row for row in rows}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((arch, False), id=arch) for arch in MULTIPROCESSOR),
        *(
            pytest.param((arch, True), id=f"{arch}-all", marks=pytest.mark.slow)
            for arch in MULTIPROCESSOR
        ),
    ],
)
def lowered(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, Any]]]:
    arch, slow = request.param
    names = ["operands", *(CALLS if slow else IN_CI)]
    rows = lower(arch, names)
    assert list(rows) == names
    return arch, rows


# Compiling takes minutes where other work shares the cores.
@pytest.mark.timeout(1600)
def test_kernels_are_machine_code_of_the_architecture(
    lowered: tuple[str, dict[str, dict[str, Any]]],
):
    arch, rows = lowered
    kernels = [kernel for row in rows.values() for kernel in row["kernels"]]
    for kernel in kernels:
        assert kernel["target"] == arch, kernel
        assert kernel["multiprocessor"] == MULTIPROCESSOR[arch], kernel
        assert (kernel["tensor_core"] > 0) == (kernel["name"] not in WITHOUT_TENSOR_CORES), kernel
    assert {kernel["name"] for kernel in kernels} >= {
        *(FORWARD_SMALL, FORWARD_LARGE, PREPROCESS, MAIN, QUERY_SMALL, QUERY_LARGE, SINK),
        "operands_kernel",
    }


def test_each_head_count_has_its_kernels(lowered: tuple[str, dict[str, dict[str, Any]]]):
    _, rows = lowered
    expected = {
        "1 heads": [FORWARD_SMALL, PREPROCESS, MAIN, QUERY_SMALL, SINK],
        "8 heads": [FORWARD_SMALL, PREPROCESS, MAIN, QUERY_SMALL],
        "64 heads": [FORWARD_SMALL, PREPROCESS, MAIN, QUERY_SMALL],
        "96 heads": [FORWARD_LARGE, PREPROCESS, MAIN, QUERY_LARGE],
        "128 heads": [FORWARD_LARGE, PREPROCESS, MAIN, QUERY_LARGE],
        # Few tokens fill the GPU only with two blocks each; the backward is the same.
        "1 heads, few tokens": [FORWARD_LARGE],
        "8 heads, few tokens": [FORWARD_LARGE],
        "64 heads, few tokens": [FORWARD_LARGE],
        "96 heads, few tokens": [],
        "128 heads, few tokens": [],
        "operands": ["operands_kernel"] * 3,
    }
    found = {name: [kernel["name"] for kernel in row["kernels"]] for name, row in rows.items()}
    once = {SINK}  # one for all head counts, compiled by the first
    for name, kernels in expected.items():
        if name in found:
            assert set(found[name]) - once == set(kernels) - once, name


def test_packed_calls_need_no_kernels_of_their_own(
    lowered: tuple[str, dict[str, dict[str, Any]]],
):
    _, rows = lowered
    for name in PACKED:
        assert rows[name]["kernels"] == []


def test_results_have_the_promised_shapes_dtypes_and_order(
    lowered: tuple[str, dict[str, dict[str, Any]]],
):
    _, rows = lowered
    for name, row in rows.items():
        if name == "operands":
            continue
        shape = CALLS[name]
        sizes = f"[{shape.batch}, {shape.heads}, {shape.tokens}"
        assert row["output"] == f"{shape.dtype} {sizes}, 512]"
        assert row["output_strides_follow_query"]
        assert row["lse"] == f"float32 {sizes}]"
        assert row["lse_contiguous"]
        assert row["gradients"] == row["inputs"]
