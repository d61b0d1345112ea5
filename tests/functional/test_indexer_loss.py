"""``indexer_kl_loss`` against its float64 oracle, and the promises around it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch import attention
from csa_dispatch.functional import attention_with_window_lse, indexer_kl_loss, teacher
from csa_dispatch.testing.indexer_loss import LossCall, indexer_loss_oracle

BATCH, HEADS, TOKENS, SIZE, POOL, SLOTS = 2, 3, 13, 8, 6, 5
OFFSETS = torch.tensor([0, 4, 4, 7, 11], dtype=torch.int32)
POOL_OFFSETS = torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32)
TENSORS = ("index_scores", "query", "sparse_kv", "kv_indices", "lse")


def draw(
    *,
    dtype: torch.dtype = torch.float32,
    dense: bool = False,
    packed: bool = False,
    lse: float = 3.0,
    scale: float = 1.0,
) -> LossCall:
    """A call whose unused slots and rows hold NaN."""
    torch.manual_seed(0)
    batch = 1 if packed else BATCH
    query = torch.randn(batch, HEADS, TOKENS, SIZE).to(dtype)
    entries = torch.randn(batch, 1, POOL, SIZE).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Nearly what an attention of that lse gives: logits are near it, and heads differ.
    level = lse + torch.randn(batch, HEADS, TOKENS).to(wide)
    indices = None
    if not dense:
        indices = torch.randint(-1, POOL + 1, (batch, TOKENS, SLOTS))
        indices[:, 5] = -1
    scores = torch.randn(batch, TOKENS, POOL if dense else SLOTS)
    if packed:
        query[:, :, int(OFFSETS[-1]) :] = math.nan
        entries[:, :, int(POOL_OFFSETS[-1]) :] = math.nan
        level[:, :, int(OFFSETS[-1]) :] = math.nan
    call = LossCall(
        scores,
        query,
        entries,
        indices,
        level,
        2 if dense else None,
        scale,
        OFFSETS if packed else None,
        POOL_OFFSETS if packed else None,
    )
    unused = indexer_loss_oracle(call).gradient_budget == 0
    return call._replace(index_scores=scores.masked_fill(unused, math.nan).requires_grad_())


def loss_of(call: LossCall, reduction: str = "none", **change: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "compress_ratio": call.compress_ratio,
        "scale": call.scale,
        "cu_seqlens": call.cu_seqlens,
        "cu_seqlens_k": call.cu_seqlens_k,
        "reduction": reduction,
    }
    tensors = dict(zip(TENSORS, call, strict=False))
    return indexer_kl_loss(**{**tensors, **arguments, **change})


def check(call: LossCall) -> None:
    oracle, loss = indexer_loss_oracle(call), loss_of(call)
    (gradient,) = torch.autograd.grad(loss.sum(), call.index_scores)
    assert loss.dtype == call.lse.dtype
    assert gradient.dtype == call.index_scores.dtype
    for found, value, budget in (
        (loss, oracle.loss, oracle.loss_budget),
        (gradient, oracle.gradient, oracle.gradient_budget),
    ):
        excess = (found.detach().double() - value).abs() - budget
        assert bool((excess <= 0).all()), float(excess.max())
    assert not loss[~oracle.counts].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_are_within_their_budgets(
    dtype: torch.dtype, dense: bool, packed: bool
) -> None:
    check(draw(dtype=dtype, dense=dense, packed=packed))


@pytest.mark.parametrize("lse", [-1000.0, 1000.0, 1e4])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_mass_that_underflows_still_has_a_target(lse: float, scale: float) -> None:
    """In fp32 every exp(z - lse) is 0 or inf here."""
    call = draw(lse=lse, scale=scale)
    check(call)
    assert int(indexer_loss_oracle(call).counts.sum()) > TOKENS


def test_the_published_case_of_lse_1000() -> None:
    """Logits [[0, 1], [2, -1]] of two heads with lse 1000 and 1001."""
    query = torch.eye(2)[None, :, None]
    entries = torch.tensor([[[0.0, 2.0], [1.0, -1.0]]])
    scores = torch.zeros(1, 1, 2, requires_grad=True)
    loss = indexer_kl_loss(
        scores,
        query,
        entries,
        torch.tensor([[[0, 1]]]),
        torch.tensor([[[1000.0], [1001.0]]]),
        scale=1.0,
    )
    loss.backward()
    assert scores.grad is not None
    target = torch.tensor([0.565785, 0.434215])
    torch.testing.assert_close(0.5 - scores.grad[0, 0], target, rtol=0, atol=1e-6)


def test_tokens_without_mass_have_no_loss_and_no_gradient() -> None:
    call = draw()
    level = call.lse.clone()
    level[:, :, 3] = math.inf  # a sink that takes all
    call = call._replace(lse=level)
    loss = loss_of(call)
    (gradient,) = torch.autograd.grad(loss.sum(), call.index_scores)
    assert not loss[:, [3, 5]].any()
    assert not gradient[:, [3, 5]].any()
    check(call)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_a_nan_lse_shows_in_its_token_alone(dense: bool, window: bool) -> None:
    call = draw(dense=dense)
    idle = 0 if dense else 5
    level = call.lse.clone()
    level[0, 1, [8, idle]] = math.nan
    levels = {"lse": None, "window_lse": level} if window else {"lse": level}
    loss = loss_of(call, **levels)
    (gradient,) = torch.autograd.grad(loss.sum(), call.index_scores)
    shown = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    shown[0, 8] = True
    assert torch.equal(loss.isnan(), shown)
    assert torch.equal(gradient.isnan().any(-1), shown)
    assert not loss[:, idle].any()  # none of its slots is used
    assert loss_of(call, "mean", **levels).isnan()


def test_a_head_without_mass_leaves_the_target_to_the_others() -> None:
    call = draw()
    level = call.lse.clone()
    level[:, 0] = math.inf
    others = call._replace(query=call.query[:, 1:], lse=level[:, 1:])
    torch.testing.assert_close(loss_of(call._replace(lse=level)), loss_of(others))


def test_a_repeated_index_is_two_slots() -> None:
    call = draw()
    indices = torch.zeros(BATCH, TOKENS, SLOTS, dtype=torch.int32)
    indices[..., 2:] = torch.tensor([1, 1, 3])
    scores = torch.randn(BATCH, TOKENS, SLOTS).requires_grad_()
    call = call._replace(kv_indices=indices, index_scores=scores)
    check(call)
    even = call._replace(index_scores=torch.zeros_like(scores).requires_grad_())
    (gradient,) = torch.autograd.grad(loss_of(even).sum(), even.index_scores)
    torch.testing.assert_close(gradient[..., 0], gradient[..., 1])


def test_the_gradient_goes_to_the_scores_alone() -> None:
    call = draw()
    for tensor in (call.query, call.sparse_kv, call.lse):
        tensor.requires_grad_()
    loss_of(call, "mean").backward()
    assert call.index_scores.grad is not None
    assert (call.query.grad, call.sparse_kv.grad, call.lse.grad) == (None, None, None)


def test_reductions_count_tokens_with_mass() -> None:
    call = draw()
    each = loss_of(call)
    count = int(indexer_loss_oracle(call).counts.sum())
    torch.testing.assert_close(loss_of(call, "sum"), each.sum())
    torch.testing.assert_close(loss_of(call, "mean"), each.sum() / count)
    assert call.kv_indices is not None
    nothing = call._replace(kv_indices=torch.full_like(call.kv_indices, -1))
    mean = loss_of(nothing, "mean")
    mean.backward()
    assert mean == 0
    assert call.index_scores.grad is not None
    assert not call.index_scores.grad.any()


def test_an_empty_pool_gives_no_loss() -> None:
    call = draw()
    assert not loss_of(call._replace(sparse_kv=call.sparse_kv[:, :, :0])).any()


@pytest.mark.parametrize("dense", [False, True])
def test_work_in_parts_changes_nothing(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw(dense=dense)
    whole = loss_of(call)
    monkeypatch.setattr(teacher, "WORK", 1)
    torch.testing.assert_close(loss_of(call), whole)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_with_window_lse_the_entries_are_added(dense: bool, packed: bool) -> None:
    """So the loss is that of the whole call's lse."""
    call = draw(dtype=torch.float64, dense=dense, packed=packed)
    local = torch.randn(call.query.shape[0], 1, TOKENS, SIZE, dtype=torch.float64)
    sink = torch.randn(HEADS, dtype=torch.float64)
    keywords: dict[str, Any] = {
        "sliding_window_size": 3,
        "compress_ratio": call.compress_ratio,
        "scale": call.scale,
        "cu_seqlens": call.cu_seqlens,
        "cu_seqlens_k": call.cu_seqlens_k,
    }
    found = attention_with_window_lse(
        call.query, local, call.sparse_kv, call.kv_indices, sink, **keywords
    )
    by_whole = loss_of(call._replace(lse=found.lse))
    lse_is_given = call._replace(lse=None)  # pyright: ignore[reportArgumentType]
    by_window = loss_of(lse_is_given, window_lse=found.window_lse)
    torch.testing.assert_close(by_window, by_whole, rtol=1e-12, atol=1e-12)


def test_a_teacher_over_all_entries_needs_no_attention_over_all() -> None:
    call = draw(dtype=torch.float64, dense=True)
    local = torch.randn(BATCH, 1, TOKENS, SIZE, dtype=torch.float64)
    picks = torch.zeros(BATCH, TOKENS, 1, dtype=torch.int32)
    sparse = attention_with_window_lse(
        call.query, local, call.sparse_kv, picks, sliding_window_size=3, scale=call.scale
    )
    _, lse = attention(
        call.query,
        local,
        call.sparse_kv,
        sliding_window_size=3,
        compress_ratio=2,
        scale=call.scale,
        return_lse=True,
    )
    lse_is_given = call._replace(lse=None)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(
        loss_of(lse_is_given, window_lse=sparse.window_lse),
        loss_of(call._replace(lse=lse)),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("dense", [False, True])
def test_autocast_leaves_the_logits_in_fp32(dense: bool) -> None:
    call = draw(dense=dense)
    expected = loss_of(call)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_of(call)
    assert torch.equal(found, expected)


def test_it_compiles_without_a_graph_break() -> None:
    call = draw()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(call, "mean"), call.index_scores)
    (wanted,) = torch.autograd.grad(loss_of(call, "mean"), call.index_scores)
    assert torch.equal(found, wanted)


def test_differentiating_twice_raises() -> None:
    call = draw()
    (gradient,) = torch.autograd.grad(loss_of(call, "mean"), call.index_scores, create_graph=True)
    with pytest.raises(RuntimeError, match=r"indexer_kl_loss\(\) is differentiable once"):
        gradient.nan_to_num().sum().backward()


def test_scores_may_be_of_another_dtype() -> None:
    call = draw()
    check(call._replace(index_scores=call.index_scores.detach().bfloat16().requires_grad_()))


GOOD = draw()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"reduction": "max"}, ValueError, "reduction is 'max'"),
        ({"scale": "1"}, TypeError, "scale is '1'"),
        ({"scale": 0.0}, ValueError, r"scale is 0\.0"),
        ({"lse": None}, ValueError, "lse is None without window_lse"),
        ({"window_lse": GOOD.lse}, ValueError, "lse is given with window_lse"),
        ({"lse": GOOD.lse.double()}, TypeError, "lse is torch.float64"),
        ({"lse": GOOD.lse[:1]}, ValueError, "lse is of shape"),
        ({"kv_indices": None}, ValueError, "kv_indices is None without compress_ratio"),
        ({"compress_ratio": 4}, ValueError, "kv_indices is given with compress_ratio"),
        ({"kv_indices": GOOD.query}, TypeError, "int32 or int64"),
        ({"query": GOOD.query[0]}, ValueError, "query is of shape"),
        ({"query": "q"}, TypeError, "query is str"),
        ({"query": GOOD.query.to_sparse()}, ValueError, "query is of layout torch.sparse_coo"),
        ({"sparse_kv": GOOD.sparse_kv.expand(-1, 2, -1, -1)}, ValueError, "one shared head"),
        ({"sparse_kv": GOOD.sparse_kv.half()}, ValueError, "sparse_kv is torch.float16"),
        ({"index_scores": GOOD.index_scores[..., :2]}, ValueError, "index_scores is of shape"),
        ({"index_scores": GOOD.kv_indices}, TypeError, "index_scores is torch.int64"),
        ({"cu_seqlens": OFFSETS}, ValueError, "cu_seqlens_k is None"),
        (
            {"cu_seqlens": OFFSETS, "cu_seqlens_k": POOL_OFFSETS},
            ValueError,
            "batch size 2",
        ),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, object], error: type[Exception], match: str
) -> None:
    arguments: dict[str, Any] = {**dict(zip(TENSORS, GOOD, strict=False)), **change}
    with pytest.raises(error, match=match) as raised:
        indexer_kl_loss(**arguments)
    assert re.search(r"; it must be .*\. .+\.$", str(raised.value)), "no remedy"
