"""The lightning indexer's float64 oracle, its cases, and the judge of picks.

A set of picks is right when it is a best one up to rounding: with scores ``s`` of the oracle and
magnitudes ``m`` (the scores of absolute values, which bound every partial sum), no entry left
out may beat an entry picked by more than

    4 u (sqrt(D) + sqrt(H)) max m

where ``u`` is the unit roundoff of the accumulation dtype: two scores, each off by a sum of D and
a sum of H independent roundings, twice over. Number, range, distinctness and padding must hold
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csa_dispatch.functional import lightning_indexer
from csa_dispatch.indexer_call import IndexerCall, IndexerSpec, indexer_spec_of

from .budgets import TensorVerdict
from .memory import place

Run = Callable[[IndexerCall], Tensor]


@dataclass(frozen=True)
class IndexerCase:
    """One generated call.

    Attributes:
        pool: rows of index_keys; None for as many as the tokens make.
        documents: lengths of packed documents, or empty.
        content: ``"normal"``, ``"negative"`` (no score above 0), ``"zeros"`` (no product above
            0), ``"integers"`` (small ones: exact sums, many of them equal), ``"ties"`` (small
            integers, all keys equal), ``"unseen NaN"`` (in all rows that nothing sees) or
            ``"NaN"`` (in rows that are seen).
        memory: ``"contiguous"`` or ``"strided"`` (heads beside tokens, columns apart).
    """

    name: str
    dtype: str = "float32"
    weights_dtype: str = "float32"
    batch: int = 1
    heads: int = 3
    tokens: int = 13
    head_dim: int = 16
    pool: int | None = None
    topk: int = 2
    compress_ratio: int = 4
    past: int = 0
    documents: tuple[int, ...] = ()
    content: str = "normal"
    memory: str = "contiguous"
    seed: int = 0

    def spec(self, device: str = "cpu", capability: int | None = None) -> IndexerSpec:
        """The case's IndexerSpec on a device."""
        spec = indexer_spec_of(build_indexer(self, "cpu"))
        return spec._replace(device_type=device, capability=capability)


CASES = (
    IndexerCase("batched", batch=2, tokens=21),
    IndexerCase("more-than-there-are", topk=9, tokens=19),
    IndexerCase("ratio-1", compress_ratio=1, tokens=9, topk=4),
    IndexerCase("ratio-5", compress_ratio=5, tokens=31),
    IndexerCase("packed", tokens=30, documents=(11, 0, 3, 13), compress_ratio=2),
    IndexerCase("packed-spare", tokens=29, documents=(13, 12), pool=9, content="unseen NaN"),
    IndexerCase("past", tokens=3, past=37, pool=10, topk=4),
    IndexerCase("few-entries", tokens=23, pool=4),
    IndexerCase("no-entries", tokens=3),
    IndexerCase("ties", tokens=24, content="ties"),
    IndexerCase("negative", tokens=24, content="negative"),
    IndexerCase("unseen-nan", tokens=22, pool=12, content="unseen NaN"),
    IndexerCase("nan", tokens=22, content="NaN"),
    IndexerCase("strided", batch=2, tokens=18, memory="strided"),
    IndexerCase("one-head", heads=1, tokens=20, head_dim=8),
    IndexerCase("tiles", heads=2, tokens=140, compress_ratio=1, topk=40, head_dim=80),
    IndexerCase("model", heads=64, tokens=40, head_dim=128, topk=6),
)
"""What every backend must get right, in float32; ``indexer_cases`` has the other dtypes."""


TIES = (
    IndexerCase("equal", tokens=24, content="ties"),
    IndexerCase("zeros", tokens=40, content="zeros", topk=5),
    IndexerCase("border", batch=2, heads=4, tokens=90, head_dim=8, compress_ratio=1, topk=11,
                content="integers"),
    IndexerCase("negative-border", heads=1, tokens=40, head_dim=3, compress_ratio=1, topk=7,
                content="integers", seed=1),
    IndexerCase("packed-border", heads=2, tokens=70, head_dim=4, compress_ratio=1, topk=6,
                documents=(25, 0, 1, 38), content="integers", seed=2),
    IndexerCase("past-border", heads=2, tokens=4, past=60, head_dim=4, compress_ratio=2, topk=9,
                content="integers", seed=3),
)  # fmt: skip
"""Calls whose scores are exact, and equal at the border of what is picked."""


def indexer_cases(dtypes: Sequence[str] = ("float32", "bfloat16")) -> list[IndexerCase]:
    """``CASES`` in each of ``dtypes``, weights in turn float32 and of the query's dtype."""
    found = []
    for dtype in dtypes:
        for position, case in enumerate(CASES):
            weights = dtype if position % 2 else "float32"
            name = f"{case.name}-{dtype}"
            found.append(replace(case, name=name, dtype=dtype, weights_dtype=weights))
    return found


def build_indexer(case: IndexerCase, device: torch.device | str = "cpu") -> IndexerCall:
    """The case's call; the same data on every device."""
    generator = torch.Generator().manual_seed(case.seed)
    offsets = offsets_k = None
    pool = case.pool
    if case.documents:
        lengths = torch.tensor((0, *case.documents))
        offsets = lengths.cumsum(0).to(torch.int32)
        offsets_k = (lengths // case.compress_ratio).cumsum(0).to(torch.int32)
        pool = int(offsets_k[-1]) if pool is None else pool
    elif pool is None:
        pool = (case.past + case.tokens) // case.compress_ratio
    dtype, weights_dtype = getattr(torch, case.dtype), getattr(torch, case.weights_dtype)
    shape = (case.batch, case.heads, case.tokens, case.head_dim)
    query = torch.randn(shape, generator=generator)
    keys = torch.randn(case.batch, pool, case.head_dim, generator=generator)
    weights = torch.randn(case.batch, case.tokens, case.heads, generator=generator)
    if case.content in ("ties", "integers"):
        query, keys, weights = (item.round().clamp(-2, 2) for item in (query, keys, weights))
    if case.content == "ties":
        keys = keys[:, :1].expand(-1, pool, -1).clone()
    elif case.content == "negative":
        weights = -weights.abs() - 0.1
    elif case.content == "zeros":
        query, keys = query.abs(), -keys.abs()
    elif case.content == "NaN":
        keys[:, 1::3] = torch.nan
    call = IndexerCall(
        query.to(dtype),
        keys.to(dtype),
        weights.to(weights_dtype),
        case.topk,
        case.compress_ratio,
        case.past,
        offsets,
        offsets_k,
    )
    if case.content == "unseen NaN":
        seen = {row for token in range(case.tokens) for row in visible_rows(call, token)}
        unseen = [row for row in range(pool) if row not in seen]
        call.index_keys[:, unseen] = torch.nan
    if case.memory == "strided":
        call = call._replace(
            index_query=place(place(call.index_query, "transposed", "query"), "strided", "query"),
            index_keys=place(call.index_keys, "strided", "sparse_kv"),
            weights=call.weights.mT.contiguous().mT,
        )
    moved = (item.to(device) if isinstance(item, Tensor) else item for item in call)
    return IndexerCall(*moved)  # pyright: ignore[reportArgumentType]


def visible_rows(call: IndexerCall, token: int) -> range:
    """Rows of ``index_keys`` that a token sees."""
    if call.cu_seqlens is None or call.cu_seqlens_k is None:
        complete = (call.past + token + 1) // call.compress_ratio
        return range(min(complete, call.index_keys.shape[1]))
    offsets, offsets_k = call.cu_seqlens.tolist(), call.cu_seqlens_k.tolist()
    for document, begin in enumerate(offsets[:-1]):
        if begin <= token < offsets[document + 1]:
            first, last = offsets_k[document], offsets_k[document + 1]
            complete = (token - begin + 1) // call.compress_ratio
            return range(first, min(first + complete, last))
    return range(0)


def oracle_scores(call: IndexerCall, batch: int, token: int) -> tuple[Tensor, Tensor]:
    """float64 scores of what a token sees (without scale), and their magnitudes."""
    rows = visible_rows(call, token)
    query = call.index_query[batch, :, token].double()
    keys = call.index_keys[batch, rows.start : rows.stop].double()
    weights = call.weights[batch, token].double()
    scores = (weights[:, None] * (query @ keys.mT).clamp(min=0)).sum(0)
    magnitudes = (weights.abs()[:, None] * (query.abs() @ keys.abs().mT)).sum(0)
    return scores, magnitudes


def first_of_equals(call: IndexerCall) -> Tensor:
    """The picks, ascending, where of equal scores the lowest indices are taken.

    ``eager`` and ``triton`` promise them where scores come out exactly, as in ``TIES``.
    """
    batch, _, tokens, _ = call.index_query.shape
    picks = torch.full((batch, tokens, call.topk), -1, dtype=torch.int32)
    for row in range(batch):
        for token in range(tokens):
            scores, _ = oracle_scores(call, row, token)
            order = scores.sort(descending=True, stable=True).indices[: call.topk]
            picks[row, token, : len(order)] = order.sort().values.to(torch.int32)
    return picks


def judge_picks(
    call: IndexerCall, picks: Tensor, tokens: Sequence[int] | None = None
) -> TensorVerdict:
    """Compare picks with the oracle's, for all tokens or some.

    The verdict's ``error`` is the largest relative loss in the sum of a token's scores.
    """
    batch, heads, total, head_dim = call.index_query.shape
    shape = (batch, total, call.topk)
    if picks.shape != shape or picks.dtype != torch.int32 or not picks.is_contiguous():
        found = f"{picks.dtype} {tuple(picks.shape)}, strides {picks.stride()}"
        return _wrong(f"is {found}; expected contiguous int32 {shape}")
    wide = torch.promote_types(call.index_query.dtype, torch.float32)
    unit = torch.finfo(wide).eps / 2
    budget = 4 * unit * (math.sqrt(head_dim) + math.sqrt(heads))
    share = loss = 0.0
    for row in range(batch):
        for token in range(total) if tokens is None else tokens:
            scores, magnitudes = oracle_scores(call, row, token)
            found = picks[row, token].long()
            count = min(call.topk, len(scores))
            used = found[:count]
            where = f"at [{row}, {token}]"
            if bool((found[count:] != -1).any()):
                return _wrong(f"{where}: {found.tolist()} is not {count} picks, then -1")
            if bool(((used < 0) | (used >= len(scores))).any()):
                return _wrong(f"{where}: {used.tolist()} of {len(scores)} entries")
            if len(used.unique()) < count:
                return _wrong(f"{where}: {used.tolist()} repeats an entry")
            if not count or count == len(scores) or not bool(scores.isfinite().all()):
                continue
            left_out = torch.ones_like(scores, dtype=torch.bool)
            left_out[used] = False
            lead = float(scores[left_out].max() - scores[used].min())
            allowed = budget * float(magnitudes.max())
            if lead > 0:
                share = max(share, lead / allowed if allowed else math.inf)
            missed = float(scores.topk(count).values.sum() - scores[used].sum())
            loss = max(loss, missed / max(float(magnitudes.topk(count).values.sum()), 1e-300))
            if share > 1:
                message = f"{where}: an entry left out leads by {lead:.3g}, allowed {allowed:.3g}"
                return TensorVerdict("picks", share, loss, 0.0, message)
    return TensorVerdict("picks", share, loss, 0.0)


def _wrong(message: str) -> TensorVerdict:
    return TensorVerdict("picks", math.inf, math.inf, 0.0, message)


def indexer_run(backend: str | None) -> Run:
    """``lightning_indexer`` forced to a backend, on a case's call."""

    def run(call: IndexerCall) -> Tensor:
        return lightning_indexer(
            call.index_query,
            call.index_keys,
            call.weights,
            call.topk,
            compress_ratio=call.compress_ratio,
            past=call.past,
            cu_seqlens=call.cu_seqlens,
            cu_seqlens_k=call.cu_seqlens_k,
            backend=backend,
        )

    return run


def _plain_picks(call: IndexerCall, relu: bool = True, weighted: bool = True) -> Tensor:
    """Picks by dense products, as a base for mutants."""
    batch, _, tokens, _ = call.index_query.shape
    picks = torch.full((batch, tokens, call.topk), -1, dtype=torch.int32)
    products = call.index_query.float() @ call.index_keys.float()[:, None].mT
    products = products.relu() if relu else products
    weights = call.weights.float().mT[..., None]
    scores = (products * weights if weighted else products).sum(1)
    for row in range(batch):
        for token in range(tokens):
            rows = visible_rows(call, token)
            seen = scores[row, token, rows.start : rows.stop]
            found = seen.topk(min(call.topk, len(seen))).indices
            picks[row, token, : len(found)] = found.to(torch.int32)
    return picks


def _one_document(call: IndexerCall) -> IndexerCall:
    return call._replace(cu_seqlens=None, cu_seqlens_k=None)


INDEXER_MUTANTS: dict[str, Run] = {
    "relu dropped": lambda call: _plain_picks(call, relu=False),
    "weights ignored": lambda call: _plain_picks(call, weighted=False),
    "one entry too early": lambda call: _plain_picks(call._replace(past=call.past + 1)),
    "one entry too late": lambda call: _plain_picks(call._replace(past=call.past - 1)),
    "ratio ignored": lambda call: _plain_picks(call._replace(compress_ratio=1)),
    "past ignored": lambda call: _plain_picks(call._replace(past=0)),
    "documents ignored": lambda call: _plain_picks(_one_document(call)),
    "least instead of largest": lambda call: _plain_picks(call._replace(weights=-call.weights)),
    "last pick lost": lambda call: _plain_picks(call).index_fill(2, torch.tensor([0]), -1),
    "plain": _plain_picks,
}
"""Indexers with one fault each, and ``"plain"`` with none."""
