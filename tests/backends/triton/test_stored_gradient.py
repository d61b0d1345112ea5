"""KV gradients from stored P and dS, in chunks, rings and column pieces far below the call's."""

from __future__ import annotations

import functools

import pytest
import torch
from csa_backend_triton import backend, portable_backward, stored_gradient
from csa_backend_triton.operands import operands_of
from csa_backend_triton.stored_scores import WORKSPACE_BYTES
from csa_backend_triton.upstream import Upstream
from csa_backend_triton.window_rows import keeps_window

from csa_dispatch.call import Call, Kind
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
    # The pool's sums in pieces of 64, 64 and 16 columns.
    (FEW_TOKENS_A_CHUNK, Case(dtype="float32", tokens=8, **{**SHAPE, "head_dim": 144})),
    (
        FEW_TOKENS_A_CHUNK,
        Case(dtype="bfloat16", tokens=8, deterministic=True, **{**SHAPE, "head_dim": 144}),
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


@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype", "kept"),
    [
        (512, 64, torch.float32, True),
        (128, 64, torch.bfloat16, True),
        (128, 64, torch.float16, False),
        (256, 64, torch.bfloat16, True),
        (256, 32, torch.bfloat16, False),
        (256, 64, torch.float16, False),
        (96, 64, torch.bfloat16, False),
    ],
)
def test_window_scores_are_kept_where_that_gains(
    head_dim: int, heads: int, dtype: torch.dtype, kept: bool
) -> None:
    query = torch.empty(1, heads, 9, head_dim, dtype=dtype, device="meta")
    local = query[:, :1]
    call = Call(query, local, None, None, None, None, None, None, 7, None, 1.0)
    assert keeps_window(operands_of(call, None)) == kept


@pytest.mark.parametrize(("slots", "kept"), [(512, True), (4096, False)])
def test_window_scores_are_not_kept_beside_thousands_of_slots(slots: int, kept: bool) -> None:
    query = torch.empty(1, 128, 9, 512, dtype=torch.float16, device="meta")
    local = query[:, :1]
    indices = torch.empty(1, 9, slots, dtype=torch.int32, device="meta")
    call = Call(query, local, local, indices, None, None, None, None, 128, None, 1.0)
    assert keeps_window(operands_of(call, None)) == kept


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 8), (192, 33)])
def test_bf16_from_kept_scores(head_dim: int, heads: int, device: str) -> None:
    sizes = {"head_dim": head_dim, "heads": heads}
    case = Case(dtype="bfloat16", tokens=9, window=5, content="nan", **sizes)
    result = check_case(case, backend_run(backend), device=device)
    assert result.status == "pass", result.message


@pytest.mark.parametrize(
    ("pool", "columns"),
    [(1, 512), (2**15, 512), (2**17, 512), (2**18, 256), (2**19, 128), (2**24, 64)],
)
def test_sums_keep_to_the_workspace(pool: int, columns: int) -> None:
    """All columns of a pool that leaves room for chunks, else a multiple of 64, 64 at least."""
    row = torch.empty(1, 1, 1, 512, device="meta")
    slots = torch.empty(1, 1, 1, dtype=torch.int32, device="meta")
    wide = torch.empty(1, 1, pool, 512, device="meta")
    call = Call(row, row, wide, slots, None, None, None, None, 1, None, 1.0)
    found = stored_gradient.columns_at_once(operands_of(call, None), WORKSPACE_BYTES)
    assert found == columns


def test_sums_past_the_workspace_leave_chunks_many_tokens() -> None:
    """A pool whose 64 columns outgrow the workspace is not worked on token by token."""
    row = torch.empty(1, 64, 4096, 512, device="meta")
    slots = torch.empty(1, 4096, 64, dtype=torch.int32, device="meta")
    wide = torch.empty(1, 1, 4_300_000, 512, device="meta")
    call = Call(row, row[:, :1], wide, slots, None, None, None, None, 128, None, 1.0)
    upstream = Upstream(operands_of(call, None), row, row[..., 0], row, row[..., 0])
    chunks: list[int] = []

    def counted(*arguments: object) -> None:
        chunks.append(arguments[4] - arguments[3])  # type: ignore[operator]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_gradient, "token_gradient", counted)
        patch.setattr(stored_gradient.PoolRows, "add", lambda *_: None)
        patch.setattr(stored_gradient.WindowRows, "advance", lambda *_: None)
        stored_gradient.stored_gradient(
            upstream, None, window=True, slots=True, deterministic=False
        )
    assert min(chunks) > 256
