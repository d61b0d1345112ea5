"""The float64 reference for full-size calls: all query rows of a chunk at once, on any device.

The oracle walks row by row, which at V4's sizes takes a minute a case. This does the same sums
(the formulas of ``testing.oracle`` and ``testing.magnitudes``) in a few large products, so it is
far less obvious; hence the oracle itself vouches for it on a sample of query rows of the very
call, and tests compare the two whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients
from csa_dispatch.testing import Case, Reference, build, oracle_forward, oracle_gradients, to_call
from csa_dispatch.testing.magnitudes import Magnitudes
from csa_dispatch.testing.plain import visible_table
from csa_dispatch.testing.targets import Exact, Unused, targets_from

_CHUNK_ELEMENTS = 1 << 25
"""Gathered key elements of one chunk of query rows: 256 MiB of float64."""

_VOUCHED = 1e-9
"""Largest difference from the oracle relative to the largest element: float64's own noise."""


def chunked_reference(case: Case, device: str, sample_rows: int) -> Reference:
    """As ``testing.reference_for``, for calls too large for the oracle.

    Args:
        case: of any content but ``"nan"``.
        device: where data and reference live.
        sample_rows: query rows on which the oracle must agree.

    Raises:
        ArithmeticError: the oracle disagrees.
    """
    inputs = build(case, device)
    call = to_call(inputs)
    exact = exact_chunked(call, inputs.grad_output)
    vouch(call, inputs.grad_output, exact, sample_rows)
    if not case.differentiable:
        exact = exact._replace(gradients=None)
    return Reference(inputs, call, targets_from(call, inputs.grad_output, exact))


def vouch(call: Call, grad_output: Tensor, exact: Exact, sample_rows: int) -> None:
    """Compare output, lse and query gradient of evenly spaced query rows with the oracle's.

    Raises:
        ArithmeticError: they differ by more than float64's noise.
    """
    count = call.query.shape[2]
    spaced = torch.linspace(0, count - 1, min(sample_rows, count)).round().long()
    tokens = sorted(set(spaced.tolist()))
    output, lse = oracle_forward(call, tokens)
    gradients = oracle_gradients(call, grad_output, tokens)
    assert gradients.query is not None
    assert exact.gradients is not None
    assert exact.gradients.query is not None
    pairs = (
        ("output", exact.output, output),
        ("lse", exact.lse, lse),
        ("dquery", exact.gradients.query, gradients.query),
    )
    for name, found, wanted in pairs:
        one, other = found[:, :, tokens], wanted[:, :, tokens]
        finite = other.isfinite()
        size = float(other[finite].abs().max()) if finite.any() else 1.0
        if not torch.allclose(one, other, rtol=0, atol=_VOUCHED * max(size, 1e-30)):
            raise ArithmeticError(f"the chunked reference's {name} is not the oracle's")


class _Chunk(NamedTuple):
    """Some query rows with their keys and softmax; G KV heads of M query heads each.

    Attributes:
        rows: ``[B, C, N]`` rows of the joined KV that each sees; the last row when unused.
        used: bool ``[B, 1, 1, C, N]``.
        keys: ``[B, G, C, N, D]``.
        query, grad, output: ``[B, G, M, C, D]``; 0 where a row or head sees nothing.
        scores, weights: ``[B, G, M, C, N]``; scores 0 where unused.
        lse, alive: ``[B, G, M, C]``; alive: some key has weight.
    """

    rows: Tensor
    used: Tensor
    keys: Tensor
    query: Tensor
    grad: Tensor
    output: Tensor
    scores: Tensor
    weights: Tensor
    lse: Tensor
    alive: Tensor


def exact_chunked(call: Call, grad_output: Tensor) -> Exact:
    """Every result of ``call`` in float64, and the sizes of the terms behind it."""
    pool = call.sparse_kv
    tokens = call.query.shape[2]
    cut = tokens + (0 if pool is None else pool.shape[2])
    sums = _Sums(call, cut + 1)
    table = visible_table(call)
    for low, high in _spans(call, table.shape[-1]):
        sums.add(low, high, _attend(call, grad_output, sums, table[:, low:high], low, high))

    unseen = sums.seen == 0
    empty = (table == cut).all(-1)
    unused = Unused(
        (empty[:, None] | (sums.sink == math.inf).flatten()[None, :, None])[..., None],
        unseen[:, None, :tokens, None],
        unseen[:, None, tokens:cut, None],
        sums.sink.flatten().isinf(),
    )

    def parted(dkv: Tensor, dsink: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        shared = None if pool is None else dkv[:, :, tokens:cut]
        return dkv[:, :, :tokens], shared, None if call.attention_sink is None else dsink

    return Exact(
        sums.output,
        sums.lse,
        Gradients(sums.dquery, *parted(sums.dkv, sums.dsink)),
        Magnitudes(
            sums.output_size.sqrt(),
            sums.dquery_size.sqrt(),
            *parted(sums.dkv_size.sqrt(), sums.dsink_size.sqrt()),
            float(sums.logit),
        ),
        unused,
    )


def _spans(call: Call, slots: int) -> Iterator[tuple[int, int]]:
    batch, groups, tokens, head_dim = call.local_kv.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * groups * slots * head_dim))
    for low in range(0, tokens, step):
        yield low, min(low + step, tokens)


class _Sums:
    """What adds up over chunks: results, and squares of the terms behind them.

    Attributes:
        kv: ``[B, G, T + S + 1, D]``: local rows, the pool's, and a row of zeros.
        sink: ``[G, M]``, -inf without one.
        seen: ``[B, T + S + 1]``: how often a row was seen.
        dkv, dkv_size: as ``kv``. dsink, dsink_size: ``[H]``. The others as the results.
    """

    def __init__(self, call: Call, rows: int) -> None:
        batch, groups, _, head_dim = call.local_kv.shape
        heads = call.query.shape[1]
        pieces = [call.local_kv] if call.sparse_kv is None else [call.local_kv, call.sparse_kv]
        zero = call.local_kv.new_zeros(batch, groups, 1, head_dim)
        self.scale = call.scale
        self.tiny = torch.finfo(call.query.dtype).tiny
        self.kv = torch.cat([*pieces, zero], dim=2).double()
        sink = call.attention_sink
        sink = self.kv.new_full((heads,), -math.inf) if sink is None else sink.double()
        self.sink = sink.reshape(groups, heads // groups)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=call.query.device)

        self.output, self.output_size = zeros(*call.query.shape), zeros(*call.query.shape)
        self.dquery, self.dquery_size = zeros(*call.query.shape), zeros(*call.query.shape)
        self.dkv, self.dkv_size = zeros(*self.kv.shape), zeros(*self.kv.shape)
        self.dsink, self.dsink_size = zeros(heads), zeros(heads)
        self.lse = zeros(*call.query.shape[:3])
        self.seen = zeros(batch, rows)
        self.logit = zeros()

    def add(self, low: int, high: int, chunk: _Chunk) -> None:
        """Add query rows ``low .. high - 1``."""
        self.output[:, :, low:high] = chunk.output.flatten(1, 2)
        self.lse[:, :, low:high] = chunk.lse.flatten(1, 2)
        dp = torch.einsum("bgmtd,bgtnd->bgmtn", chunk.grad, chunk.keys)
        delta = (chunk.grad * chunk.output).sum(-1, keepdim=True)
        share = torch.exp(self.sink[None, :, :, None] - chunk.lse)
        share = torch.where(chunk.alive, share, 0.0)
        self._gradients(low, high, chunk, dp, delta, share)
        self._sizes(low, high, chunk, dp, delta, share)

    def _gradients(
        self, low: int, high: int, chunk: _Chunk, dp: Tensor, delta: Tensor, share: Tensor
    ) -> None:
        dz = self.scale * chunk.weights * (dp - delta)
        dquery = torch.einsum("bgmtn,bgtnd->bgmtd", dz, chunk.keys)
        self.dquery[:, :, low:high] = dquery.flatten(1, 2)
        dkv = torch.einsum("bgmtn,bgmtd->bgtnd", dz, chunk.query)
        dkv += torch.einsum("bgmtn,bgmtd->bgtnd", chunk.weights, chunk.grad)
        self._scatter(self.dkv, chunk, dkv)
        self.dsink -= (share * delta[..., 0]).sum((0, 3)).flatten()
        ones = torch.ones_like(chunk.rows, dtype=torch.float64)
        self.seen.scatter_add_(1, chunk.rows.flatten(1), ones.flatten(1))

    def _sizes(
        self, low: int, high: int, chunk: _Chunk, dp: Tensor, delta: Tensor, share: Tensor
    ) -> None:
        rho = chunk.grad * chunk.output.abs().clamp(min=self.tiny)
        rho = rho.norm(dim=-1, keepdim=True)
        counts = chunk.used & chunk.alive[..., None]
        weight = torch.where(counts, chunk.weights.clamp(min=self.tiny), 0.0).square()
        ds = (chunk.weights * torch.hypot(dp, delta.expand_as(dp))).clamp(min=self.tiny)
        ds = torch.where(counts, ds, 0.0).square()
        keys, query = chunk.keys.square(), chunk.query.square()

        own = torch.einsum("bgmtn,bgtnd->bgmtd", ds, keys) + (rho * chunk.output).square()
        self.dquery_size[:, :, low:high] = self.scale**2 * own.flatten(1, 2)
        output = torch.einsum("bgmtn,bgtnd->bgmtd", weight, keys)
        self.output_size[:, :, low:high] = output.flatten(1, 2)
        by_key = self.scale**2 * (ds + (chunk.weights * rho).square())
        dkv = torch.einsum("bgmtn,bgmtd->bgtnd", by_key, query)
        dkv += torch.einsum("bgmtn,bgmtd->bgtnd", weight, chunk.grad.square())
        self._scatter(self.dkv_size, chunk, dkv)
        both = share.square() * (delta.square() + rho.square())[..., 0]
        self.dsink_size += both.sum((0, 3)).flatten()

        terms = self.scale * torch.einsum("bgmtd,bgtnd->bgmtn", query, keys).sqrt()
        lse = torch.where(chunk.used.any(-1) & chunk.lse.isfinite(), chunk.lse, 0.0)
        for size in (chunk.scores, terms, lse):
            if size.numel():
                self.logit = torch.maximum(self.logit, size.abs().amax())

    def _scatter(self, total: Tensor, chunk: _Chunk, values: Tensor) -> None:
        """Add ``values`` ``[B, G, C, N, D]`` to the rows of ``total`` that the chunk sees."""
        for entry, rows, part in zip(total, chunk.rows, values, strict=True):
            entry.index_add_(1, rows.flatten(), part.flatten(1, 2))


def _attend(
    call: Call, grad_output: Tensor, sums: _Sums, rows: Tensor, low: int, high: int
) -> _Chunk:
    batch, groups, _, head_dim = sums.kv.shape
    spread = rows[:, None, :, :, None].expand(-1, groups, -1, -1, head_dim)
    keys = sums.kv.gather(2, spread.flatten(2, 3)).unflatten(2, rows.shape[1:])
    used = (rows != sums.kv.shape[2] - 1)[:, None, None]
    sink = sums.sink[None, :, :, None]
    sees = used.any(-1)
    alive = sees & (sink != math.inf)

    def grouped(tensor: Tensor, keep: Tensor) -> Tensor:
        part = tensor[:, :, low:high].detach().double().unflatten(1, sums.sink.shape)
        return torch.where(keep[..., None], part, 0.0)

    query, grad = grouped(call.query, sees), grouped(grad_output, alive)
    scores = sums.scale * torch.einsum("bgmtd,bgtnd->bgmtn", query, keys)
    masked = scores.masked_fill(~used, -math.inf)
    largest = sink.expand(batch, -1, -1, rows.shape[1])
    if rows.shape[-1]:
        largest = torch.maximum(masked.amax(-1), largest)
    largest = torch.where(alive, largest, 0.0)
    total = torch.exp(masked - largest[..., None]).sum(-1) + torch.exp(sink - largest)
    lse = torch.where(alive, largest + torch.log(total), sink)
    weights = torch.where(alive[..., None], torch.exp(masked - lse[..., None]), 0.0)
    output = torch.einsum("bgmtn,bgtnd->bgmtd", weights, keys)
    return _Chunk(
        rows, used, keys, query, grad, output, scores.masked_fill(~used, 0.0), weights, lse, alive
    )
