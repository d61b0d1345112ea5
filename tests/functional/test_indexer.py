"""``lightning_indexer``: every backend by the oracle, mutants, arguments, memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from csa_backend_eager import indexer as eager_indexer
from csa_backend_eager import largest as eager_largest
from csa_backend_eager.largest import largest

from csa_dispatch import BackendRefused, IndexerCall, IndexerSpec, backends, explain
from csa_dispatch.bench.memory import extra_memory
from csa_dispatch.functional import lightning_indexer
from csa_dispatch.testing.indexer import (
    INDEXER_MUTANTS,
    TIES,
    IndexerCase,
    build_indexer,
    first_of_equals,
    indexer_cases,
    indexer_run,
    judge_picks,
    oracle_scores,
)

CASES = {case.name: case for case in indexer_cases(("float32", "bfloat16", "float64"))}
NAMES = [name for name, row in backends().items() if row.available]
TILE_BYTES = 64 * 2**20


@pytest.mark.parametrize("backend", ["eager", "attention_gym"])
@pytest.mark.parametrize("name", CASES)
def test_picks_are_the_oracles(name: str, backend: str):
    if backend not in NAMES:
        pytest.skip(f"{backend} is not here")
    call = build_indexer(CASES[name])
    refused = explain(CASES[name].spec(), backend=backend).forward is None
    if refused:
        with pytest.raises(BackendRefused):
            indexer_run(backend)(call)
        return
    verdict = judge_picks(call, indexer_run(backend)(call))
    assert verdict.passed, verdict.message


@pytest.mark.parametrize("mutant", INDEXER_MUTANTS)
def test_the_cases_catch_every_mutant_and_pass_what_is_right(mutant: str):
    def passes(case: IndexerCase) -> bool:
        call = build_indexer(case)
        try:
            return judge_picks(call, INDEXER_MUTANTS[mutant](call)).passed
        except RuntimeError:  # documents ignored: some pools are then too short
            return False

    cases = [case for case in CASES.values() if case.dtype == "float32"]
    assert all(map(passes, cases)) == (mutant == "plain")


def test_a_backward_is_not_recorded():
    call = build_indexer(CASES["batched-float32"])
    picks = indexer_run(None)(call._replace(index_query=call.index_query.requires_grad_()))
    assert picks.dtype == torch.int32
    assert not picks.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("case", TIES, ids=lambda case: case.name)
def test_of_equal_scores_the_lowest_indices_are_picked(case: IndexerCase, dtype: str):
    call = build_indexer(replace(case, dtype=dtype))
    assert torch.equal(indexer_run("eager")(call), first_of_equals(call))


@pytest.mark.parametrize("case", TIES, ids=lambda case: case.name)
def test_the_calls_with_ties_have_them_where_picks_end(case: IndexerCase):
    call = build_indexer(case)
    found = 0
    for token in range(case.tokens):
        scores = oracle_scores(call, 0, token)[0].sort(descending=True).values
        found += len(scores) > case.topk and bool(scores[case.topk - 1] == scores[case.topk])
    assert found > 0


def test_runs_of_entries_do_not_change_which_of_equals_are_picked(monkeypatch: pytest.MonkeyPatch):
    whole = [indexer_run("eager")(build_indexer(case)) for case in TIES]
    monkeypatch.setattr(eager_indexer, "ENTRIES", 5)
    for case, picks in zip(TIES, whole, strict=True):
        assert torch.equal(indexer_run("eager")(build_indexer(case)), picks), case.name


def test_negative_zero_is_equal_to_zero():
    scores = torch.tensor([[0.0, -0.0, -1.0, 0.0, 1.0, -0.0], [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0]])
    values, columns = largest(scores, 3)
    assert columns.tolist() == [[0, 1, 4], [0, 1, 2]]
    assert values.tolist() == [[0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("waits", [True, False], ids=["some rows", "all rows, without a sync"])
@pytest.mark.parametrize("count", [1, 7, 30])
def test_the_largest_are_the_first_of_a_stable_sort(
    count: int, waits: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(eager_largest, "may_wait", lambda scores: waits)
    scores = torch.randint(-2, 3, (200, 30), generator=torch.Generator().manual_seed(0)).float()
    scores[::2, 11:] = -torch.inf
    values, columns = largest(scores, count)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    for row, found in enumerate(columns):
        finite = [place for place in order[row].tolist() if scores[row, place] > -torch.inf]
        assert found[: len(finite)].tolist() == sorted(finite)
    assert torch.equal(values, scores.gather(1, columns))
    assert bool((values[::2, 11:] == -torch.inf).all())


@pytest.mark.parametrize("case", ["normal", *TIES], ids=lambda case: getattr(case, "name", case))
def test_steps_pick_what_the_whole_sequence_picks(case: IndexerCase | str):
    if not isinstance(case, IndexerCase):
        # Many heads: hardly any score is exactly 0, and none ties.
        case = IndexerCase("whole", tokens=41, topk=3, heads=24)
    elif case.documents or case.past:
        pytest.skip("not the beginning of one sequence")
    call = build_indexer(case)
    whole = indexer_run(None)(call)
    for past in range(case.tokens):
        step = call._replace(
            index_query=call.index_query[:, :, past : past + 1],
            weights=call.weights[:, past : past + 1],
            index_keys=call.index_keys[:, : (past + 1) // case.compress_ratio],
            past=past,
        )
        assert torch.equal(indexer_run(None)(step)[:, 0], whole[:, past])


def test_it_compiles_and_takes_fake_tensors():
    call = build_indexer(CASES["packed-float32"])
    compiled = torch.compile(indexer_run(None), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(call), indexer_run(None)(call))
    on_meta = IndexerCall(
        *(item.to("meta") if isinstance(item, torch.Tensor) else item for item in call)
    )
    assert indexer_run(None)(on_meta).shape == (1, 30, 2)


def test_autocast_casts_what_attention_casts():
    call = build_indexer(CASES["model-float32"])
    half = call._replace(
        index_query=call.index_query.bfloat16(), index_keys=call.index_keys.bfloat16()
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(indexer_run(None)(call), indexer_run(None)(half))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_query": torch.zeros(2, 8, 16)}, r"index_query is of shape \[2, 8, 16\]"),
        ({"index_query": torch.zeros(1, 2, 8, 16, dtype=torch.int32)}, "index_query is torch.int"),
        ({"index_query": None}, "index_query is NoneType"),
        ({"index_keys": torch.zeros(1, 2, 16, dtype=torch.float16)}, "index_keys is torch.float1"),
        ({"index_keys": torch.zeros(1, 1, 2, 16)}, r"index_keys is of shape \[1, 1, 2, 16\]"),
        ({"index_keys": torch.zeros(1, 2, 16, device="meta")}, "index_keys is on meta"),
        ({"weights": torch.zeros(1, 2, 8)}, r"weights is of shape \[1, 2, 8\]"),
        ({"topk": 0}, "topk is 0; it must be 1"),
        ({"topk": 2.0}, r"topk is 2.0 \(float\)"),
        ({"compress_ratio": 0}, "compress_ratio is 0"),
        ({"compress_ratio": None}, "compress_ratio is None"),
        ({"past": -1}, "past is -1"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}, "cu_seqlens_k is None"),
        ({"backend": "egaer"}, "Did you mean 'eager'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "index_query": torch.zeros(1, 2, 8, 16),
        "index_keys": torch.zeros(1, 2, 16),
        "weights": torch.zeros(1, 8, 2),
        "topk": 1,
        "compress_ratio": 4,
    }
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        lightning_indexer(**arguments | change)
    assert re.search(r"\. .+[.?]$", str(raised.value)), "no remedy"


def test_offsets_of_packed_documents_are_checked():
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    arguments = {"topk": 1, "compress_ratio": 4, "cu_seqlens": offsets, "cu_seqlens_k": offsets}
    tensors = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 16), torch.zeros(1, 8, 2)
    with pytest.raises(ValueError, match="past is 3 with cu_seqlens"):
        lightning_indexer(*tensors, past=3, **arguments)
    with pytest.raises(TypeError, match=r"cu_seqlens_k is torch\.int64"):
        lightning_indexer(*tensors, **arguments | {"cu_seqlens_k": offsets.long()})
    batched = [tensor.expand(2, *tensor.shape[1:]) for tensor in tensors]
    with pytest.raises(ValueError, match="cu_seqlens is given with batch size 2"):
        lightning_indexer(*batched, **arguments)


@pytest.mark.parametrize("backend", ["eager", "attention_gym", "triton"])
def test_just_outside_every_bound_is_refused(backend: str):
    """Asked about an SM90, whatever is here; with a call that the claims hold inside."""
    row = backends()[backend]
    assert row.backend is not None
    claims = row.backend.operations["lightning_indexer"].forward_capabilities
    inside = IndexerSpec(device_type="cuda", capability=90, weights_dtype="bfloat16")
    assert claims.reasons(inside) == ()
    for field, allowed in claims.bounds().items():
        for value in allowed.outside():
            reasons = claims.reasons(inside._replace(**{field: value}))
            assert field in [reason.field for reason in reasons]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capability", 80),
        ("weights_dtype", "float32"),
        ("strides", "unit"),
        ("heads", 257),
        ("head_dim", 84),
        ("tokens", 2**20 + 1),
        ("pool", 1023),
    ],
)
def test_attention_gyms_kernel_is_not_claimed_beyond_what_it_takes(field: str, value: object):
    spec = IndexerSpec(device_type="cuda", capability=90, weights_dtype="bfloat16", tokens=4096)
    claims = backends()["attention_gym"].backend.operations["lightning_indexer"]
    fields = [
        reason.field
        for reason in claims.forward_capabilities.reasons(spec._replace(**{field: value}))
    ]
    assert field in fields


def long_call(tokens: int) -> IndexerCall:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, tokens, 16, generator=generator)
    keys = torch.randn(1, tokens // 4, 16, generator=generator)
    weights = torch.randn(1, tokens, 4, generator=generator)
    return IndexerCall(query, keys, weights, 64, 4, 0, None, None)


def check_long(tokens: int) -> None:
    """Picks of a few tokens by the oracle, memory by the profiler."""
    call = long_call(tokens)
    found: list[torch.Tensor] = []

    def run() -> list[torch.Tensor]:
        found[:] = [indexer_run("eager")(call)]
        return found

    # Beside the tile: where each token's entries begin and end.
    assert extra_memory(run, torch.device("cpu")) < TILE_BYTES + 64 * tokens
    verdict = judge_picks(call, found[0], [*range(0, tokens, tokens // 16), tokens - 1])
    assert verdict.passed, verdict.message


@pytest.mark.serial
def test_memory_is_bounded_at_8192_tokens():
    scores = 4 * 8192 * 2048
    assert scores * 4 > 2 * TILE_BYTES
    check_long(8192)


@pytest.mark.slow
def test_memory_is_bounded_at_65536_tokens():
    check_long(65536)
