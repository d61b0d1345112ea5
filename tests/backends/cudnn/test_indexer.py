"""The indexer's adapter on a CPU: cuDNN's documented meaning stands in for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from csa_backend_cudnn import backend, indexer
from csa_backend_cudnn.entry_points import IndexerEntryPoints
from torch import Tensor

import csa_dispatch
from csa_dispatch import IndexerSpec
from csa_dispatch.testing.indexer import (
    TIES,
    IndexerCase,
    build_indexer,
    first_of_equals,
    indexer_cases,
    judge_picks,
)
from tests.backends.cudnn import documented_indexer

OPERATION = backend.operations["lightning_indexer"]
CASES = {
    case.name: replace(case, heads=max(16, case.heads), head_dim=128)
    for case in indexer_cases(("bfloat16",))
}
LONG = IndexerCase("long", "bfloat16", tokens=300, heads=4, head_dim=128, topk=9, compress_ratio=1)
BLOCKS = (
    LONG,
    replace(LONG, name="past", past=40),
    replace(LONG, name="batched", batch=2, tokens=150),
    # A block ends within the first, the fourth and the last document.
    replace(LONG, name="packed", documents=(140, 0, 3, 120, 30)),
)


class Calls:
    """The two functions, and how often each was called."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.queries: list[int] = []

    def scores(self, q: Tensor, *arguments: object, **options: object) -> dict[str, Tensor]:
        found = documented_indexer.scores(q, *arguments, **options)  # type: ignore[arg-type]
        self.shapes.append(tuple(found["scores"].shape))
        self.queries.append(q.data_ptr())
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    points = IndexerEntryPoints(found.scores, documented_indexer.top_k)
    monkeypatch.setattr(indexer, "indexer_entry_points", lambda: points)
    return found


def check(case: IndexerCase) -> Tensor:
    call = build_indexer(case)
    picks = OPERATION.forward(call)
    verdict = judge_picks(call, picks)
    assert verdict.passed, verdict.message
    return picks


@pytest.mark.parametrize("name", CASES)
def test_picks_are_the_oracles(name: str, calls: Calls):
    check(CASES[name])


@pytest.mark.parametrize("case", TIES, ids=lambda case: case.name)
def test_of_equal_scores_the_lowest_indices_are_picked(case: IndexerCase, calls: Calls):
    case = replace(case, dtype="bfloat16", heads=4, head_dim=128)
    call = build_indexer(case)
    assert torch.equal(OPERATION.forward(call), first_of_equals(call))


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_blocks_of_tokens_pick_what_the_whole_picks(
    case: IndexerCase, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    whole = check(case)
    assert len(calls.shapes) == 1
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", 1)
    assert torch.equal(check(case), whole)
    rows = case.batch * 128
    assert [shape[0] for shape in calls.shapes[1:]] == [
        min(rows, case.batch * (case.tokens - first)) for first in range(0, case.tokens, 128)
    ]


def test_documents_that_began_before_the_first_token_are_continued(calls: Calls):
    call = build_indexer(replace(LONG, documents=(140, 0, 3, 120, 30)))
    assert call.cu_seqlens is not None
    whole = OPERATION.forward(call)
    later = call._replace(
        index_query=call.index_query[:, :, 100:],
        weights=call.weights[:, 100:],
        cu_seqlens=call.cu_seqlens - 100,
    )
    assert torch.equal(OPERATION.forward(later), whole[:, 100:])


def test_no_kernel_runs_where_every_entry_is_picked(calls: Calls):
    check(replace(LONG, tokens=200, compress_ratio=25))
    assert calls.shapes == []


def test_scores_are_no_wider_than_what_the_tokens_see(calls: Calls):
    check(replace(LONG, pool=1000, tokens=20))
    assert calls.shapes == [(20, 256)]


def test_a_query_that_lies_by_token_is_not_copied(calls: Calls):
    call = build_indexer(LONG)
    call = call._replace(index_query=call.index_query.transpose(1, 2).contiguous().transpose(1, 2))
    OPERATION.forward(call)
    assert calls.queries == [call.index_query.data_ptr()]


MODEL = IndexerSpec(device_type="cuda", capability=90)


@pytest.mark.parametrize("device", ["sm_90", "sm_100", "sm_103"])
def test_v4s_indexer_is_claimed(device: str):
    for heads, topk in ((64, 512), (64, 1024)):
        spec = MODEL._replace(heads=heads, topk=topk)
        decision = csa_dispatch.explain(spec, device=device, backend="cudnn")
        assert decision.forward == "cudnn"
        assert any("copies the query" in note for note in decision.notes)


@pytest.mark.parametrize(
    ("device", "change", "field"),
    [
        ("sm_80", {}, "capability"),
        ("sm_120", {}, "capability"),
        ("cpu", {}, "device_type"),
        ("sm_90", {"dtype": "float16"}, "dtype"),
        ("sm_90", {"heads": 8}, "heads"),
        ("sm_100", {"heads": 128}, "heads"),
        ("sm_90", {"head_dim": 64}, "head_dim"),
        ("sm_90", {"topk": 2049}, "topk"),
    ],
)
def test_what_it_cannot_do_has_a_reason(device: str, change: dict, field: str):
    decision = csa_dispatch.explain(MODEL._replace(**change), device=device, backend="cudnn")
    reasons = decision.refused()["cudnn"]
    assert field in [reason.field for reason in reasons]
    assert all(reason.remedy for reason in reasons)


@pytest.mark.parametrize("capability", [90, 100])
def test_just_outside_every_bound_is_refused(capability: int):
    claims: Callable = OPERATION.forward_capabilities.reasons
    inside = MODEL._replace(capability=capability)
    assert claims(inside) == ()
    for field, allowed in OPERATION.forward_capabilities.bounds().items():
        assert allowed.outside()
        for value in allowed.outside():
            assert field in [item.field for item in claims(inside._replace(**{field: value}))]
