"""The portable kernels against the float64 oracle, within the error budgets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from csa_backend_triton import backend

from csa_dispatch.call import Kind
from csa_dispatch.testing import Case, backend_run, cases_for, check_case

SMALL = {"tokens": (1, 5, 16), "heads": (1, 3, 4, 16), "head_dim": (16, 40, 80, 192)}
"""Sizes that interpret in a second or so a case."""


def covering(strength: int) -> list[Case]:
    return cases_for(
        backend.forward_capabilities,
        backend.backward_capabilities,
        device_type="cuda" if torch.cuda.is_available() else "cpu",
        capability=80 if torch.cuda.is_available() else None,
        axes=SMALL,
        strength=strength,
    )


def passes(case: Case, device: str) -> None:
    result = check_case(case, backend_run(backend), device=device)
    assert result.status == "pass", f"{case.name}: {result.message}"


@pytest.mark.parametrize("case", covering(1), ids=lambda case: case.name)
def test_each_claimed_value_is_right(case: Case, device: str) -> None:
    passes(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(2), ids=lambda case: case.name)
def test_each_pair_of_claimed_values_is_right(case: Case, device: str) -> None:
    passes(case, device)


WIDE = [
    Case(kind=kind, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tokens=6)
    for kind in Kind
    for dtype, heads, kv_heads, head_dim in [
        ("bfloat16", 64, 1, 512),
        ("float32", 3, 1, 576),
        ("bfloat16", 6, 6, 576),
        ("float16", 40, 2, 320),
    ]
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_wide_heads_in_two_parts_are_right(case: Case, device: str) -> None:
    passes(case, device)


@pytest.mark.parametrize("heads", [1, 31, 65, 127, 256])
def test_any_number_of_heads_is_right(heads: int, device: str) -> None:
    passes(Case(dtype="bfloat16", heads=heads, tokens=3, head_dim=16), device)


@pytest.mark.parametrize("slots", [0, 1, 63, 64, 65, 129, 513])
def test_any_number_of_slots_is_right(slots: int, device: str) -> None:
    passes(Case(heads=2, tokens=3, head_dim=16, pool=200, slots=slots), device)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_window_may_exceed_the_sequence(kind: Kind, device: str) -> None:
    passes(Case(kind=kind, tokens=70, heads=1, head_dim=16, window=2**31), device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("documents", ["none", "cu_seqlens", "doc_ids"])
def test_the_deterministic_backward_repeats_itself(
    dtype: str, documents: str, device: str
) -> None:
    case = Case(dtype=dtype, documents=documents, content="duplicates", tokens=12, head_dim=16)
    passes(dataclasses.replace(case, deterministic=True), device)
