"""``attention_with_past``: the last rows of ``attention()`` over the whole, and no others."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch import attention, record_receipts
from csa_dispatch.functional import attention_with_past

TOKENS, ENTRIES, RATIO = 30, 10, 3
KINDS = ("window", "gather", "dense")


def tensors(kind: str, dtype: torch.dtype = torch.float64):
    """query, local_kv, sparse_kv, kv_indices, sink of a whole sequence, and compress_ratio."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, local_kv = draw(2, 4, TOKENS, 8), draw(2, 2, TOKENS, 8)
    pool = None if kind == "window" else draw(2, 2, ENTRIES, 8)
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


def test_rows_that_the_window_lacks_are_named():
    query, local_kv, *_ = tensors("window")
    with pytest.raises(ValueError, match="local_kv has 2 rows before the queries' own"):
        attention_with_past(query[:, :, 20:], local_kv[:, :, 18:], past=20, sliding_window_size=6)
