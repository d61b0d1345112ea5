"""The compressor's kernels against the float64 oracle, and compiled for every architecture."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from csa_backend_triton import backend
from torch import Tensor

from csa_dispatch import CompressorCall, CompressorSpec
from csa_dispatch.compressor_call import compressor_spec_of, pool_offsets
from csa_dispatch.testing.check import deterministic_algorithms
from csa_dispatch.testing.compressor import compressor_shares

COMPRESSOR = backend.operations["compress_kv"]
ALL = (True, True, True)
PROGRAM = Path(__file__).with_name("cross_compile_compressor.py")


class Sizes(NamedTuple):
    """One call; ``offsets`` packs documents."""

    ratio: int = 4
    overlapping: bool = True
    tokens: int = 30
    head_dim: int = 24
    dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype = torch.float32
    batch: int = 1
    offsets: tuple[int, ...] = ()


CASES = {
    "overlapping": Sizes(batch=2),
    "overlapping, no tail": Sizes(tokens=32, dtype=torch.bfloat16),
    "packed": Sizes(offsets=(0, 5, 5, 8, 17, 19), dtype=torch.bfloat16),
    "packed, all tokens": Sizes(offsets=(0, 4, 30), dtype=torch.float16),
    "plain": Sizes(8, False, 40, dtype=torch.float16, bias_dtype=torch.float16),
    "plain packed": Sizes(4, False, 60, 16, offsets=(0, 3, 14, 15, 40)),
    "128": Sizes(128, False, 300, 70, dtype=torch.bfloat16, batch=2),
    "wide": Sizes(tokens=9, head_dim=300, dtype=torch.bfloat16, bias_dtype=torch.bfloat16),
    "odd ratio": Sizes(3, True, 11, 5),
    "largest ratio": Sizes(256, True, 520, 3),
    "one token": Sizes(1, False, 7, 3),
    "fewer than a block": Sizes(tokens=3),
    "many entries a program": Sizes(2, False, 90, 4),
}


def draw(sizes: Sizes, device: str) -> tuple[CompressorCall, Tensor]:
    """Values and gates are halves of one projection; NaN where no entry may read."""
    torch.manual_seed(0)
    channels = sizes.head_dim * (2 if sizes.overlapping else 1)
    fused = torch.randn(sizes.batch, sizes.tokens, 2 * channels).to(sizes.dtype)
    bias = torch.randn(sizes.ratio, channels).to(sizes.bias_dtype)
    offsets = sizes.offsets or (0, sizes.tokens)
    fused[:, offsets[-1] :] = math.nan
    counts = [(end - start) // sizes.ratio for start, end in pairwise(offsets)]
    for count, (start, end) in zip(counts, pairwise(offsets), strict=True):
        fused[:, start + count * sizes.ratio : end] = math.nan
    cu_seqlens = cu_seqlens_k = None
    if sizes.offsets:
        cu_seqlens = torch.tensor(sizes.offsets, dtype=torch.int32, device=device)
        cu_seqlens_k = pool_offsets(cu_seqlens, sizes.ratio)
    call = CompressorCall(
        *fused.to(device).chunk(2, -1),
        bias.to(device),
        sizes.ratio,
        sizes.overlapping,
        cu_seqlens,
        cu_seqlens_k,
    )
    grad = torch.randn(sizes.batch, call.entries, sizes.head_dim).to(sizes.dtype)
    if sizes.offsets:
        grad[:, sum(counts) :] = math.nan
    return call, grad.to(device)


@pytest.mark.parametrize("case", CASES)
def test_entries_and_gradients_are_within_their_budgets(case: str, device: str) -> None:
    call, grad = draw(CASES[case], device)
    # Fresh memory is NaN then, so that what is not written shows.
    with deterministic_algorithms(True):
        results = (COMPRESSOR.forward(call), *COMPRESSOR.backward(call, grad, ALL))
    shares = compressor_shares(call, results, grad)
    assert max(shares.values()) < 1, shares


@pytest.mark.parametrize("case", ["overlapping", "packed"])
def test_each_gradient_alone_is_the_same(case: str, device: str) -> None:
    call, grad = draw(CASES[case], device)
    together = COMPRESSOR.backward(call, grad, ALL)
    for chosen in range(3):
        needs = tuple(place == chosen for place in range(3))
        alone = COMPRESSOR.backward(call, grad, needs)
        assert [item is not None for item in alone] == list(needs)
        assert torch.equal(alone[chosen], together[chosen])


def test_any_strides_are_right(device: str) -> None:
    call, _ = draw(CASES["overlapping"], device)
    grad = torch.ones(1, 1, 1, device=device).expand(2, call.entries, call.head_dim)
    other = call._replace(
        values=call.values.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        gates=call.gates.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert torch.equal(COMPRESSOR.forward(other), COMPRESSOR.forward(call))
    for one, two in zip(
        COMPRESSOR.backward(other, grad, ALL),
        COMPRESSOR.backward(call, grad.contiguous(), ALL),
        strict=True,
    ):
        assert torch.equal(one, two)


def test_what_is_not_claimed_is_refused() -> None:
    spec = CompressorSpec(device_type="cuda", capability=90)
    claims = COMPRESSOR.forward_capabilities
    assert not claims.reasons(spec)
    for change in (
        {"dtype": "float64"},
        {"compress_ratio": 257},
        {"capability": 75},
        {"device_type": "meta"},
    ):
        assert claims.reasons(spec._replace(**change)), change


def test_the_spec_says_what_the_call_is() -> None:
    call, _ = draw(CASES["packed"], "cpu")
    spec = compressor_spec_of(call, (True, False, True))
    assert spec == CompressorSpec(
        tokens=30,
        head_dim=24,
        documents="cu_seqlens",
        needs_grad=(True, False, True),
    )
    assert spec.differentiable


SPILL_LIMIT = 256
"""Bytes spilled by a kernel, stores and loads together, over its whole text."""


CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)


def compiled(*names: str) -> list[dict[str, Any]]:
    """What the kernels of the calls (all without names) use on each architecture."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), ",".join(map(str, CAPABILITIES)), *names],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["capability"] for kernel in kernels} == set(CAPABILITIES)
    for kernel in kernels:
        assert kernel["shared"] <= kernel["shared_limit"], kernel
        assert kernel["spills"] <= SPILL_LIMIT, kernel


def test_the_main_kernels_compile_within_their_means() -> None:
    check(compiled("overlapping", "plain-packed"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_within_its_means() -> None:
    check(compiled())
