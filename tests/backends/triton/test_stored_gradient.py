"""KV gradients from stored P and dS, in chunks and rings far smaller than the call."""

from __future__ import annotations

import functools

import pytest
from csa_backend_triton import backend, portable_backward, stored_gradient

from csa_dispatch.call import Kind
from csa_dispatch.testing import Case, backend_run, check_case

TWO_CHUNKS = 40_000
FEW_TOKENS_A_CHUNK = 20_000

SHAPE = {"head_dim": 16, "heads": 4, "kv_heads": 2, "window": 7}
CASES = [
    (TWO_CHUNKS, Case(kind=Kind.WINDOW, dtype="bfloat16", tokens=70, **SHAPE)),
    (
        FEW_TOKENS_A_CHUNK,
        Case(dtype="float32", batch=2, tokens=8, deterministic=True, **SHAPE),
    ),
    (
        FEW_TOKENS_A_CHUNK,
        Case(dtype="bfloat16", documents="cu_seqlens", tokens=20, content="nan", **SHAPE),
    ),
    (
        FEW_TOKENS_A_CHUNK,
        Case(kind=Kind.WINDOW, dtype="float16", documents="cu_seqlens", tokens=20, **SHAPE),
    ),
    (
        FEW_TOKENS_A_CHUNK,
        Case(kind=Kind.DENSE, dtype="bfloat16", documents="doc_ids", tokens=9, **SHAPE),
    ),
]


@pytest.mark.parametrize(
    ("workspace", "case"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_chunks_of_tokens_add_up(
    workspace: int, case: Case, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = functools.partial(stored_gradient.stored_gradient, workspace=workspace)
    monkeypatch.setattr(portable_backward, "stored_gradient", bounded)
    monkeypatch.setattr(portable_backward, "keeps_window", lambda operands: True)
    result = check_case(case, backend_run(backend), device=device)
    assert result.status == "pass", result.message
