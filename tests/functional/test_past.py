"""``attention_with_past``: the last rows of ``attention()`` over the whole, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from csa_dispatch import Kind, attention, record_receipts, use_backend
from csa_dispatch.functional import attention_with_past

TOKENS, ENTRIES, RATIO = 30, 10, 3
KINDS = ("window", "gather", "dense")


def tensors(kind: str, dtype: torch.dtype = torch.float64, head_dim: int = 8):
    """query, local_kv, sparse_kv, kv_indices, sink of a whole sequence, and compress_ratio."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, local_kv = draw(2, 4, TOKENS, head_dim), draw(2, 2, TOKENS, head_dim)
    pool = None if kind == "window" else draw(2, 2, ENTRIES, head_dim)
    table = torch.randint(-2, ENTRIES + 2, (2, TOKENS, 5), generator=generator)
    complete = (torch.arange(TOKENS)[:, None] + 1) // RATIO
    picks = torch.where(table < complete, table, ENTRIES + 5) if kind == "gather" else None
    return query, local_kv, pool, picks, draw(4), RATIO if kind == "dense" else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 1, 6, 40])
@pytest.mark.parametrize("past", [0, 1, 4, 17, 29])
@pytest.mark.parametrize("spare", [0, 3])
def test_rows_and_gradients_are_those_of_the_whole(kind, window, past, spare):
    query, local_kv, pool, picks, sink, ratio = tensors(kind)
    leaves = [x.requires_grad_() for x in (query, local_kv, pool, sink) if x is not None]
    whole = attention(
        query,
        local_kv,
        pool,
        picks,
        sink,
        sliding_window_size=window,
        compress_ratio=ratio,
        scale=0.7,
    )[:, :, past:]
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, upstream)
    kept = max(0, past - max(window - 1, 0) - spare)
    found = attention_with_past(
        query[:, :, past:],
        local_kv[:, :, kept:],
        pool,
        None if picks is None else picks[:, past:],
        sink,
        past=past,
        sliding_window_size=window,
        compress_ratio=ratio,
        scale=0.7,
    )
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, upstream), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_costs_one_row(kind):
    query, local_kv, pool, picks, sink, ratio = tensors(kind)
    with record_receipts() as receipts:
        attention_with_past(
            query[:, :, 29:],
            local_kv[:, :, 24:],
            pool,
            None if picks is None else picks[:, 29:],
            sink,
            past=29,
            sliding_window_size=6,
            compress_ratio=ratio,
        )
    (receipt,) = receipts
    assert receipt.spec.tokens == 1
    assert receipt.spec.slots == {"window": 6, "gather": 6 + 5, "dense": 6 + ENTRIES}[kind]


def test_few_picks_are_all_that_is_copied_of_many_entries():
    query, local_kv, pool, picks, sink, _ = tensors("gather")
    pools = pool, torch.cat((pool, torch.full_like(pool, torch.nan)), dim=2)
    found = []
    for entries in pools:
        with record_receipts() as receipts:
            found.append(
                attention_with_past(
                    query[:, :, 29:],
                    local_kv[:, :, 24:],
                    entries,
                    torch.where(picks < ENTRIES, picks, -1)[:, 29:],
                    sink,
                    past=29,
                    sliding_window_size=6,
                )
            )
        # The window, and the entries or the five picks.
        assert receipts[0].spec.pool == 6 + (ENTRIES if entries is pool else 5)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("kind", "window", "most"), [("window", 6, 2), ("dense", 6, 2), ("gather", 5, 6)]
)
def test_windows_of_few_tokens_are_gathered_and_more_use_the_window(kind, window, most, more):
    query, local_kv, pool, picks, sink, ratio = tensors(kind)
    before = window - 1
    tokens = most * before + more
    past = TOKENS - tokens
    with record_receipts() as receipts:
        attention_with_past(
            query[:, :, past:],
            local_kv[:, :, past - before :],
            pool,
            None if picks is None else picks[:, past:],
            sink,
            past=past,
            sliding_window_size=window,
            compress_ratio=ratio,
        )
    gathered = not more
    kinds = {"window": Kind.WINDOW, "gather": Kind.GATHER, "dense": Kind.DENSE}
    # Offsets stand for one document each: a call for each of the two rows of the batch.
    assert len(receipts) == (2 if kind == "dense" and not gathered else 1)
    for receipt in receipts:
        assert receipt.spec.tokens == tokens + (0 if gathered else before)
        assert receipt.spec.window == (0 if gathered else window)
        assert receipt.spec.kind is (Kind.GATHER if gathered else kinds[kind])


# A backend without the gather kind runs no few tokens.
STEPS = {"attention_gym": (1, 3, 10, 14), "flex": (14, 20)}


@torch.no_grad()
@pytest.mark.parametrize("backend", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_gives_the_rows_of_the_whole(kind, backend):
    if backend == "flex" and kind == "gather":
        return
    query, local_kv, pool, picks, sink, ratio = tensors(kind, torch.float32, 16)
    local_kv, pool = (None if rows is None else rows[:, :1] for rows in (local_kv, pool))
    check_steps(query, local_kv, pool, picks, sink, ratio, backend, STEPS[backend])


def check_steps(query, local_kv, pool, picks, sink, ratio, backend, sizes):
    """Steps of these sizes, forced onto the backend, against the whole on eager."""
    scalars = {"sliding_window_size": 6, "compress_ratio": ratio}
    expected = attention(query, local_kv, pool, picks, sink, backend="eager", **scalars)
    for tokens in sizes:
        past = TOKENS - tokens
        with use_backend(backend), record_receipts() as receipts:
            found = attention_with_past(
                query[:, :, past:],
                local_kv[:, :, past - 5 :],
                pool,
                None if picks is None else picks[:, past:],
                sink,
                past=past,
                **scalars,
            )
        assert {receipt.backend for receipt in receipts} == {backend}
        torch.testing.assert_close(found, expected[:, :, past:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [2**32, 2**32 + 1, -(2**32), 2**31 - 1])
def test_indices_outside_int32_are_unused(index: int):
    query, local_kv, pool, picks, sink, _ = tensors("gather")
    assert picks is not None
    unused, outside = picks.clone(), picks.clone()
    unused[..., 0], outside[..., 0] = -1, index
    expected, found = (
        attention_with_past(
            query[:, :, 29:],
            local_kv[:, :, 24:],
            pool,
            table[:, 29:],
            sink,
            past=29,
            sliding_window_size=6,
        )
        for table in (unused, outside)
    )
    assert torch.equal(found, expected)


def test_autocast_casts_what_attention_casts():
    query, local_kv, pool, picks, *_ = tensors("gather", torch.float32)
    assert picks is not None
    call = local_kv.bfloat16()[:, :, 24:], pool, picks[:, 29:]
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_with_past(query[:, :, 29:], *call, past=29, sliding_window_size=6)
    assert found.dtype == torch.bfloat16


GOOD: dict[str, Any] = dict(
    zip(
        ("query", "local_kv", "sparse_kv", "kv_indices", "attention_sink"),
        tensors("gather"),
        strict=False,
    )
)
GOOD |= {"query": GOOD["query"][:, :, 29:], "kv_indices": GOOD["kv_indices"][:, 29:]}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"past": -1}, ValueError, "past is -1"),
        ({"past": 29.0}, TypeError, r"past is 29\.0"),
        ({"query": [1]}, TypeError, "query is list"),
        ({"local_kv": GOOD["local_kv"][:, 0]}, ValueError, "local_kv is of shape"),
        ({"local_kv": GOOD["local_kv"][:, :, 27:]}, ValueError, "local_kv is of 2 rows before"),
        ({"local_kv": GOOD["local_kv"][:, :, :0]}, ValueError, "local_kv is of shape"),
        ({"sparse_kv": GOOD["sparse_kv"].float()}, ValueError, "sparse_kv is torch.float32"),
        ({"sparse_kv": GOOD["sparse_kv"][:1]}, ValueError, "sparse_kv is of shape"),
        ({"sparse_kv": None}, ValueError, "kv_indices is given"),
        ({"kv_indices": None}, ValueError, "kv_indices is None with sparse_kv"),
        ({"kv_indices": GOOD["kv_indices"].float()}, TypeError, "kv_indices is torch.float32"),
        ({"kv_indices": GOOD["kv_indices"][:1]}, ValueError, "kv_indices is of shape"),
        ({"compress_ratio": 4}, ValueError, "compress_ratio is 4 with kv_indices"),
        ({"kv_indices": None, "compress_ratio": 0}, ValueError, "compress_ratio is 0"),
        ({"sliding_window_size": -1}, ValueError, "sliding_window_size is -1"),
    ],
)
def test_bad_arguments_are_named(change, error, match):
    with pytest.raises(error, match=match):
        attention_with_past(**{**GOOD, "past": 29, "sliding_window_size": 4, **change})


def test_tokens_are_counted_within_int32() -> None:
    query, local_kv = torch.randn(1, 4, 9, 16), torch.randn(1, 1, 13, 16)
    pool = torch.ones(1, 1, 3, 16)
    with pytest.raises(ValueError, match=r"past is 2147483639; it must be 0 to 2147483638"):
        attention_with_past(
            query, local_kv, pool, past=2**31 - 9, sliding_window_size=5, compress_ratio=4
        )
