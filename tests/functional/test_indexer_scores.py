"""``indexer_scores``: values and gradients against float64 autograd over the definition."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch.bench.memory import extra_memory
from csa_dispatch.functional import indexer_scores, lightning_indexer, score_chunks
from csa_dispatch.functional.score_chunks import CHUNK_BYTES
from csa_dispatch.testing.indexer import build_indexer, indexer_cases, visible_rows

CASES = {case.name: case for case in indexer_cases() if case.content != "NaN"}
WITH_ENTRIES = [name for name in CASES if not name.startswith("no-entries")]


def defined(query: Tensor, keys: Tensor, weights: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Scores of absolute rows, -1 unused, by advanced indexing; differentiable."""
    batch = torch.arange(len(keys))[:, None, None]
    picked = keys[batch, rows.clamp(min=0).long()].masked_fill((rows < 0)[..., None], 0)
    products = torch.einsum("bhtd,btkd->bthk", query, picked).relu()
    return scale * torch.einsum("bth,bthk->btk", weights, products)


def draw(name: str) -> tuple[Any, Tensor, Tensor]:
    """A case's call, its picks, and the same as rows of the pool."""
    call = build_indexer(CASES[name])
    picks = lightning_indexer(
        *call[:4],
        compress_ratio=call.compress_ratio,
        past=call.past,
        cu_seqlens=call.cu_seqlens,
        cu_seqlens_k=call.cu_seqlens_k,
    )
    starts = [visible_rows(call, token).start for token in range(picks.shape[1])]
    return call, picks, torch.where(picks < 0, -1, picks + torch.tensor(starts)[:, None])


@pytest.mark.parametrize("name", WITH_ENTRIES)
def test_scores_and_gradients_are_the_definitions(name: str):
    call, picks, rows = draw(name)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call[:3]]
    found = indexer_scores(
        *leaves, picks, cu_seqlens=call.cu_seqlens, cu_seqlens_k=call.cu_seqlens_k
    )
    wide = [tensor.detach().double().requires_grad_() for tensor in call[:3]]
    scale = (call.index_query.shape[1] * call.index_query.shape[3]) ** -0.5
    expected = defined(*wide, rows, scale)
    assert found.dtype == torch.float32
    assert torch.equal(found == -torch.inf, picks < 0)
    used = picks >= 0
    torch.testing.assert_close(found[used].double(), expected[used], rtol=1e-5, atol=1e-5)

    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(found, leaves, upstream.masked_fill(~used, torch.nan))
    want = torch.autograd.grad(expected, wide, upstream.double().masked_fill(~used, 0))
    for leaf, actual, right in zip(leaves, got, want, strict=True):
        assert actual.dtype == leaf.dtype
        # One rounding of the result, and the fp32 sums behind it.
        budget = torch.finfo(leaf.dtype).eps * right.abs() + 1e-5 * right.abs().max()
        assert bool(((actual.double() - right).abs() <= budget).all())


def every_row(call: Any) -> Tensor:
    """Rows of the pool as every token's slots, ``[B, T, S]``, -1 where it does not see them."""
    batch, _, tokens, _ = call.index_query.shape
    rows = torch.full((tokens, call.index_keys.shape[1]), -1)
    for token in range(tokens):
        seen = visible_rows(call, token)
        rows[token, seen.start : seen.stop] = torch.arange(seen.start, seen.stop)
    return rows.expand(batch, -1, -1)


@pytest.mark.parametrize("chunk", [1, 5000, CHUNK_BYTES])
@pytest.mark.parametrize("name", [name for name in WITH_ENTRIES if not CASES[name].past])
def test_every_complete_entry_scores_as_if_picked(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", chunk)
    call, rows = build_indexer(CASES[name]), every_row(build_indexer(CASES[name]))
    unseen = ~(rows[0, :, :, None] == torch.arange(rows.shape[2])).any(0).any(0)
    call.index_keys[:, unseen] = torch.nan
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call[:3]]
    found = indexer_scores(
        *leaves,
        compress_ratio=call.compress_ratio,
        cu_seqlens=call.cu_seqlens,
        cu_seqlens_k=call.cu_seqlens_k,
    )
    wide = [tensor.detach().double().requires_grad_() for tensor in call[:3]]
    scale = (call.index_query.shape[1] * call.index_query.shape[3]) ** -0.5
    expected, used = defined(*wide, rows, scale), rows >= 0
    assert torch.equal(found == -torch.inf, ~used)
    torch.testing.assert_close(found[used].double(), expected[used], rtol=1e-5, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(found, leaves, upstream.masked_fill(~used, torch.nan))
    want = torch.autograd.grad(expected, wide, upstream.double().masked_fill(~used, 0))
    for leaf, actual, right in zip(leaves, got, want, strict=True):
        assert actual.dtype == leaf.dtype
        budget = torch.finfo(leaf.dtype).eps * right.abs() + 1e-5 * right.abs().max()
        assert bool(((actual.double() - right).abs() <= budget).all())


@pytest.mark.parametrize("needed", range(3))
def test_each_gradient_alone(needed: int):
    call, picks, _ = draw("batched-float32")
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call[:3]]
    indexer_scores(*leaves, picks).masked_fill(picks < 0, 0).sum().backward()
    alone = [tensor.detach().clone() for tensor in call[:3]]
    alone[needed].requires_grad_()
    indexer_scores(*alone, picks).masked_fill(picks < 0, 0).sum().backward()
    torch.testing.assert_close(alone[needed].grad, leaves[needed].grad)


def test_a_pool_without_entries_scores_nothing():
    call, picks, _ = draw("no-entries-float32")
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call[:3]]
    scores = indexer_scores(*leaves, picks)
    assert bool((scores == -torch.inf).all())
    for gradient in torch.autograd.grad(scores, leaves, torch.ones_like(scores)):
        assert not gradient.any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["batched-float32", "packed-spare-float32"])
def test_no_slots_give_no_scores(name: str, compiled: bool):
    call, picks, _ = draw(name)
    score = indexer_scores
    if compiled:
        score = torch.compile(indexer_scores, backend="aot_eager", fullgraph=True)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call[:3]]
    scores = score(
        *leaves, picks[..., :0], cu_seqlens=call.cu_seqlens, cu_seqlens_k=call.cu_seqlens_k
    )
    assert list(scores.shape) == [*picks.shape[:2], 0]
    assert scores.dtype == torch.float32
    for gradient in torch.autograd.grad(scores.sum(), leaves):
        assert not gradient.any()


def test_what_is_not_picked_reaches_nothing():
    call, picks, _ = draw("packed-spare-float32")
    call.index_query[:, :, 25:] = torch.nan
    call.weights[:, 25:] = torch.nan
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call[:3]]
    scores = indexer_scores(
        *leaves, picks, cu_seqlens=call.cu_seqlens, cu_seqlens_k=call.cu_seqlens_k
    )
    assert not scores.isnan().any()
    for gradient in torch.autograd.grad(scores, leaves, torch.ones_like(scores)):
        assert bool(gradient.isfinite().all())


def test_second_derivatives_raise():
    call, picks, _ = draw("batched-float32")
    query = call.index_query.detach().requires_grad_()
    scores = indexer_scores(query, *call[1:3], picks).masked_fill(picks < 0, 0)
    (gradient,) = torch.autograd.grad(scores.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"indexer_scores\(\) is differentiable once"):
        torch.autograd.grad(gradient.sum(), query)


def test_autocast_leaves_the_sums_in_fp32():
    call, picks, _ = draw("model-bfloat16")
    plain = indexer_scores(*call[:3], picks)
    with torch.autocast("cpu", torch.bfloat16):
        inside = indexer_scores(*call[:3], picks)
        cast = indexer_scores(call.index_query.float(), call.index_keys.float(), call[2], picks)
    assert torch.equal(plain, inside)
    assert torch.equal(plain, cast)


def test_it_compiles():
    call, picks, _ = draw("batched-float32")
    scale = torch.compile(indexer_scores, backend="aot_eager", fullgraph=True)
    query = call.index_query.detach().requires_grad_()
    found = scale(query, *call[1:3], picks)
    assert torch.equal(found, indexer_scores(*call[:3], picks))
    found.masked_fill(picks < 0, 0).sum().backward()
    assert query.grad is not None
    assert torch.equal(
        scale(query, *call[1:3], compress_ratio=4), indexer_scores(*call[:3], compress_ratio=4)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_keys": torch.zeros(1, 4, 9)}, r"index_keys is of shape \[1, 4, 9\]"),
        ({"weights": torch.zeros(1, 8, 2, dtype=torch.float64)}, "weights is torch.float64"),
        ({"kv_indices": torch.zeros(1, 7, 2, dtype=torch.int32)}, "kv_indices is of shape"),
        ({"kv_indices": torch.zeros(1, 8, 2)}, "kv_indices is torch.float32"),
        ({"kv_indices": None}, "kv_indices is None without compress_ratio"),
        ({"compress_ratio": 4}, "kv_indices is given with compress_ratio"),
        ({"kv_indices": None, "compress_ratio": 0}, "compress_ratio is 0"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}, "cu_seqlens_k is None"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "index_query": torch.zeros(1, 2, 8, 16),
        "index_keys": torch.zeros(1, 4, 16),
        "weights": torch.zeros(1, 8, 2),
        "kv_indices": torch.zeros(1, 8, 2, dtype=torch.int32),
    }
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        indexer_scores(**arguments | change)
    assert re.search(r"; it must be .*\. .+\.$", str(raised.value)), "no remedy"


@pytest.mark.serial
@pytest.mark.parametrize("every_entry", [False, True])
def test_memory_does_not_grow_with_tokens_times_heads_times_slots(every_entry: bool):
    tokens, heads, slots = 4096, 32, 256
    entries = slots if every_entry else 512
    query = torch.randn(1, heads, tokens, 32, requires_grad=True)
    keys, weights = torch.randn(1, entries, 32, requires_grad=True), torch.randn(1, tokens, heads)
    picks = torch.randint(0, 512, (1, tokens, slots), dtype=torch.int32)
    scored = {"compress_ratio": 16} if every_entry else {"kv_indices": picks}

    def train() -> list[Tensor | None]:
        scores = indexer_scores(query, keys, weights, **scored)
        seen = scores.masked_fill(scores == -torch.inf, 0)
        return [scores, *torch.autograd.grad(seen.sum(), (query, keys))]

    # Rows of the pool and masks are of the scores' size, whatever the number of heads.
    of_scores = 24 * tokens * slots
    assert extra_memory(train, torch.device("cpu")) < CHUNK_BYTES + of_scores
    assert 4 * tokens * slots * (heads + 32) > 3 * CHUNK_BYTES


def test_forward_derivatives_are_refused_and_ratios_bounded() -> None:
    query, keys, weights = torch.randn(1, 2, 8, 4), torch.randn(1, 8, 4), torch.randn(1, 8, 2)

    def scores(query: torch.Tensor, ratio: int = 4) -> torch.Tensor:
        return indexer_scores(query, keys, weights, compress_ratio=ratio)

    with pytest.raises(NotImplementedError, match=r"indexer_scores\(\) is inside torch\.func"):
        torch.func.jvp(scores, (query,), (query,))
    with pytest.raises(ValueError, match="compress_ratio is 4294967297; it must be 1 to"):
        scores(query, 2**32 + 1)


def test_parameters_without_values_are_named() -> None:
    empty = torch.nn.UninitializedParameter()
    with pytest.raises(ValueError, match="weights is an uninitialised parameter"):
        indexer_scores(torch.randn(1, 2, 8, 4), torch.randn(1, 8, 4), empty, compress_ratio=4)
