"""Backward: probabilities recomputed from lse, tile by tile and segment by segment.

With P = exp(z - lse), delta = <output, grad_output> per row and value = key:

    dP = grad_output key^T        dS = P (dP - delta)
    grad_query = scale dS key     grad_key = scale dS^T query + P^T grad_output
    grad_sink  = -sum_t exp(sink - lse) delta
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients

from .branch import Branch, KVGradient, Segment
from .forward import sees_a_key, sink_of_rows
from .masking import fill_where, largest
from .products import (
    add_rows_times_keys,
    add_scores_times_keys,
    add_scores_times_rows,
    cover_unseen,
    empty_scores,
    scores_times_rows,
)
from .tiles import Tile, accumulate_dtype, tiles
from .workspace import Workspace


class Saved(NamedTuple):
    """What forward left and what comes from above: output, lse, grad_output."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor


class TileRows(NamedTuple):
    """A tile's rows, ``[batches, G, tokens, R, (D)]``, contiguous, accumulation dtype.

    Rows that must stay out of products shared with others have query, grad_output and delta 0
    and lse +inf, so that P = dS = 0: those that see no key, and those whose result is NaN.

    Attributes:
        tainted: bool, rows whose result is NaN: the gradients of their query and of every key
            they see become NaN.
        sink_terms: ``exp(sink - lse) * delta``, 0 for rows that see no key.
        largest: the largest magnitudes in query and in grad_output.
    """

    query: Tensor
    grad_output: Tensor
    delta: Tensor
    lse: Tensor
    tainted: Tensor
    sink_terms: Tensor
    largest: tuple[float, float]


def backward(
    call: Call,
    branches: list[Branch],
    saved: Saved,
    needs: tuple[bool, bool, bool, bool],
    workspace: Workspace,
) -> Gradients:
    """The gradients ``needs`` asks for; ``branches`` is the local one, then the pool's if any."""
    query, sink = call.query, call.attention_sink
    kv_heads = call.local_kv.shape[1]
    dtype = accumulate_dtype(query.dtype)
    grad_query = torch.empty_like(query) if needs[0] else None
    wanted = zip(branches, needs[1:3], strict=False)
    grad_keys = [KVGradient(branch.source) if need else None for branch, need in wanted]
    grad_sink = query.new_zeros(query.shape[1], dtype=dtype)

    for tile in tiles(call):
        rows = _load(call, tile, saved, sees_a_key(branches, tile, query.device), workspace)
        grad_sink -= rows.sink_terms.sum(dim=(0, 2)).flatten()
        grad_rows = None
        if needs[0]:
            grad_rows = workspace.empty("grad_query", rows.query.shape, dtype).zero_()
        for branch, grad_key in zip(branches, grad_keys, strict=True):
            _differentiate(call, branch, tile, rows, (grad_rows, grad_key), workspace)
        if grad_query is not None and grad_rows is not None:
            fill_where(grad_rows, rows.tainted, torch.nan)
            tile.rows_of(grad_query, kv_heads).copy_(grad_rows)

    results = [None if grad is None else grad.result() for grad in grad_keys]
    return Gradients(
        grad_query,
        results[0],
        results[1] if len(results) > 1 else None,
        grad_sink.to(sink.dtype) if needs[3] and sink is not None else None,
    )


def _load(call: Call, tile: Tile, saved: Saved, sees: Tensor, workspace: Workspace) -> TileRows:
    """Copy a tile's rows and take out those that must not reach a shared product."""
    dtype = accumulate_dtype(call.query.dtype)

    def part(tensor: Tensor) -> Tensor:
        return tile.rows_of(tensor, call.local_kv.shape[1])

    query = workspace.copy("query", part(call.query), dtype)
    grad_output = workspace.copy("grad_output", part(saved.grad_output), dtype)
    product = workspace.empty("product", query.shape, dtype)
    delta = torch.mul(part(saved.output), grad_output, out=product).sum(dim=-1)
    lse = workspace.copy("lse", part(saved.lse), dtype)
    live = sees & ~lse.isinf()  # lse is +inf under a sink of +inf: all gradients are 0
    tainted = live & ~(lse + delta).isfinite()
    sink_terms = torch.where(live, (sink_of_rows(call, query) - lse).exp() * delta, 0)
    out = ~live | tainted
    fill_where(query, out, 0)
    fill_where(grad_output, out, 0)
    return TileRows(
        query,
        grad_output,
        delta.masked_fill_(out, 0),
        lse.masked_fill_(out, torch.inf),
        tainted,
        sink_terms,
        (largest(query), largest(grad_output)),
    )


def _differentiate(
    call: Call,
    branch: Branch,
    tile: Tile,
    rows: TileRows,
    into: tuple[Tensor | None, KVGradient | None],
    workspace: Workspace,
) -> None:
    """Add one branch's part to the gradients of a tile's query rows and of the branch's keys.

    Either is None when it is not wanted.
    """
    grad_query, grad_key = into
    if grad_query is None and grad_key is None:
        return
    for segment in branch.segments(tile):
        probability, grad_score = _scores(rows, segment, call.scale, workspace)
        if grad_query is not None:
            add_scores_times_keys(grad_query, grad_score, segment, call.scale)
        if grad_key is not None:
            grad = workspace.empty("grad_keys", segment.keys.shape, rows.query.dtype)
            scores_times_rows(grad, probability, rows.grad_output)
            add_scores_times_rows(grad, grad_score, rows.query, call.scale)
            branch.add_gradient(grad_key, tile, segment, grad, _tainted(rows, segment))


def _scores(
    rows: TileRows, segment: Segment, scale: float, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """P and dS of a segment, ``[batches, G, blocks, tokens of a block, R, N]``."""
    blocks = segment.keys.shape[2]
    lse = rows.lse.unflatten(2, (blocks, -1)).unsqueeze(-1)
    delta = rows.delta.unflatten(2, (blocks, -1)).unsqueeze(-1)
    scores = empty_scores(workspace, "scores", rows.query, segment)
    torch.sub(segment.bias.unsqueeze(-2), lse, out=scores)
    add_rows_times_keys(scores, rows.query, segment, scale)
    cover_unseen(scores, segment, rows.largest[0], scale, -torch.inf)
    probability = scores.exp_()
    grad_score = empty_scores(workspace, "grad_scores", rows.query, segment).copy_(delta.neg())
    add_rows_times_keys(grad_score, rows.grad_output, segment, 1.0)
    cover_unseen(grad_score, segment, rows.largest[1], 1.0, 0.0)
    return probability, grad_score.mul_(probability)


def _tainted(rows: TileRows, segment: Segment) -> Tensor:
    """Keys a tainted row sees: bool ``[batches, G, blocks, N]``."""
    blocks = segment.keys.shape[2]
    by_token = rows.tainted.any(dim=-1).unflatten(2, (blocks, -1)).unsqueeze(-2)
    dtype = segment.bias.dtype
    seen = (segment.bias != -torch.inf).to(dtype)
    return torch.matmul(by_token.to(dtype), seen).squeeze(-2) > 0
