"""The oracle is right: by hand, by finite differences, against autograd, against the bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa_dispatch import Call, Kind, token_bounds
from csa_dispatch.call_spec import GRADIENT_INPUTS
from csa_dispatch.testing import (
    Case,
    build,
    oracle_forward,
    oracle_gradients,
    plain_attention,
    to_call,
    visible_rows,
)

KINDS = tuple(Kind)
DOCUMENTS = ("none", "cu_seqlens", "doc_ids")


def simple_call(query, local_kv, **fields) -> Call:
    """A one-head float64 call from ``[T, D]`` lists, window 1, scale 1."""
    as_rows = lambda rows: torch.tensor(rows, dtype=torch.float64)[None, None]  # noqa: E731
    call = Call(
        as_rows(query), as_rows(local_kv), None, None, None, None, None, None, 1, None, 1.0
    )
    return call._replace(**fields)


def test_one_key_and_a_sink_by_hand():
    """logit 0 against a sink of ln 3: a quarter of the value, lse ln 4."""
    call = simple_call([[0.0, 0.0]], [[1.0, 2.0]], attention_sink=torch.tensor([math.log(3)]))
    output, lse = oracle_forward(call)
    torch.testing.assert_close(output.flatten(), torch.tensor([0.25, 0.5]).double())
    assert lse.item() == pytest.approx(math.log(4))


def test_repeated_slot_counts_as_often_as_it_occurs():
    pool = torch.tensor([[1.0], [2.0]]).double()[None, None]
    indices = torch.tensor([[[1, 1, 1, 0]]])
    call = simple_call([[0.0]], [[9.0]], sliding_window_size=0, sparse_kv=pool, kv_indices=indices)
    output, lse = oracle_forward(call)
    assert output.item() == pytest.approx(7 / 4)
    assert lse.item() == pytest.approx(math.log(4))
    gradients = oracle_gradients(call, torch.ones_like(output))
    assert gradients.sparse_kv is not None
    torch.testing.assert_close(gradients.sparse_kv.flatten(), torch.tensor([0.25, 0.75]).double())


def test_weights_add_up_to_one_under_extreme_logits():
    """Beside an lse of 1e38 float64 resolves nothing: exp(z - lse) would be 1 for each key."""
    pool = torch.tensor([[2.0], [2.0]]).double()[None, None]
    call = simple_call(
        [[1.0]],
        [[0.0]],
        sliding_window_size=0,
        sparse_kv=pool,
        kv_indices=torch.tensor([[[0, 1, 1]]]),
        scale=1e38,
    )
    output, _ = oracle_forward(call)
    assert output.item() == 2


def test_rows_without_keys_give_zero_and_the_sink():
    nan = torch.full((1, 1, 2, 1), math.nan, dtype=torch.float64)
    call = simple_call([[1.0], [1.0]], [[1.0], [1.0]], sliding_window_size=0)
    output, lse = oracle_forward(call)
    assert output.eq(0).all()
    assert lse.eq(-math.inf).all()
    call = call._replace(attention_sink=torch.tensor([0.5]))
    assert oracle_forward(call)[1].eq(0.5).all()
    for gradient in oracle_gradients(call, nan):
        assert gradient is None or gradient.eq(0).all()


@pytest.mark.parametrize(
    ("sink", "output", "lse"), [(math.inf, 0.0, math.inf), (-math.inf, 2.0, 0)]
)
def test_infinite_sinks_take_the_limit_and_get_no_gradient(sink, output, lse):
    call = simple_call([[0.0]], [[2.0]], attention_sink=torch.tensor([sink]))
    got, got_lse = oracle_forward(call)
    assert (got.item(), got_lse.item()) == (output, lse)
    gradients = oracle_gradients(call, torch.ones_like(got))
    assert gradients.attention_sink is not None
    assert gradients.attention_sink.item() == 0
    assert gradients.local_kv is not None
    assert gradients.local_kv.item() == (0.0 if sink > 0 else 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_gradients_are_finite_differences_of_the_forward(kind, documents):
    case = Case(
        kind=kind, documents=documents, dtype="float64", sink="same", content="duplicates",
        heads=2, tokens=7, head_dim=3, pool=4, slots=3, window=2, compress_ratio=2,
    )  # fmt: skip
    inputs = build(case)
    call, step = to_call(inputs), 1e-6
    gradients = oracle_gradients(call, inputs.grad_output)
    for name, gradient in zip(GRADIENT_INPUTS, gradients, strict=True):
        tensor = getattr(call, name)
        if tensor is None:
            assert gradient is None
            continue
        found = torch.zeros_like(tensor).flatten()
        for place in range(tensor.numel()):
            loss = []
            for sign in (1, -1):
                moved = tensor.clone()
                moved.view(-1)[place] += sign * step
                output, _ = oracle_forward(call._replace(**{name: moved}))
                loss.append((output * inputs.grad_output).sum())
            found[place] = (loss[0] - loss[1]) / (2 * step)
        torch.testing.assert_close(gradient, found.view_as(tensor), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("content", ["random", "messy", "nan"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_autograd_through_plain_pytorch_agrees(kind, documents, content):
    case = Case(
        kind=kind, documents=documents, content=content, dtype="float64", sink="same",
        batch=2, heads=6, kv_heads=2, head_dim=8,
    )  # fmt: skip
    inputs = build(case)
    wanted = [t for t in (getattr(inputs, name) for name in GRADIENT_INPUTS) if t is not None]
    call = to_call(inputs)
    live = call._replace(**{n: getattr(inputs, n) for n in GRADIENT_INPUTS})
    output, lse = plain_attention(live)
    found = iter(torch.autograd.grad(output, wanted, inputs.grad_output))
    exact_output, exact_lse = oracle_forward(call)
    torch.testing.assert_close(output, exact_output, equal_nan=True, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, exact_lse, equal_nan=True, atol=1e-12, rtol=1e-12)
    for gradient in oracle_gradients(call, inputs.grad_output):
        if gradient is not None:
            torch.testing.assert_close(
                next(found), gradient, equal_nan=True, atol=1e-11, rtol=1e-11
            )


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@st.composite
def calls(draw) -> Call:
    """Calls of every kind and document form, sizes and bounds anywhere, data irrelevant."""
    kind = draw(st.sampled_from(KINDS))
    documents = draw(st.sampled_from(DOCUMENTS))
    batch = 1 if documents == "cu_seqlens" else draw(st.integers(1, 2))
    offsets = pool_offsets = ids = None
    tokens, pool = draw(st.integers(1, 14)), draw(st.integers(0, 9))
    if documents == "cu_seqlens":
        count = draw(st.integers(1, 4))
        lengths = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
        shares = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        offsets, pool_offsets = offsets_of(lengths), offsets_of(shares)
        tokens = max(1, int(offsets[-1]) + draw(st.integers(0, 3)))
        pool = int(pool_offsets[-1]) + draw(st.integers(0, 2))
    elif documents == "doc_ids":
        steps = st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=tokens, max_size=tokens)
        ids = torch.tensor([draw(steps) for _ in range(batch)]).cumsum(1)
    indices = None
    if kind is Kind.GATHER:
        slot = st.one_of(st.integers(-2, 10), st.sampled_from([-(2**31), 2147480000]))
        row = st.lists(slot, min_size=3, max_size=3)
        indices = torch.tensor([[draw(row) for _ in range(tokens)] for _ in range(batch)])
    windowed = kind is Kind.WINDOW
    return Call(
        torch.zeros(batch, 1, tokens, 1),
        torch.zeros(batch, 1, tokens, 1),
        None if windowed else torch.zeros(batch, 1, pool, 1),
        indices,
        None,
        offsets,
        None if windowed else pool_offsets,
        ids,
        draw(st.sampled_from([0, 1, 2, 5, 100])),
        draw(st.integers(1, 5)) if kind is Kind.DENSE else None,
        1.0,
    )


@settings(max_examples=300, deadline=None)
@given(calls())
def test_token_bounds_agree_with_what_the_oracle_sees(call: Call):
    bounds = token_bounds(call)
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    for b, rows in enumerate(visible_rows(call)):
        for t, row in enumerate(rows):
            start, low, high = 0, 0, pool
            if bounds is not None:
                start = int(bounds.window_start[b, t])
                if bounds.pool_start is not None and bounds.pool_end is not None:
                    low, high = int(bounds.pool_start[b, t]), int(bounds.pool_end[b, t])
            assert row.local == list(range(max(start, t - call.sliding_window_size + 1), t + 1))
            if call.kind is Kind.DENSE:
                assert row.pool == list(range(low, high))
            elif call.kv_indices is not None:
                slots = call.kv_indices[b, t].tolist()
                assert row.pool == [low + i for i in slots if 0 <= i < high - low]
