"""The float64 oracle: the operation written straight from its definition, one query row at a time.

For a query row the visible keys are listed by the definition's own words (window, selected
slots, complete compressed entries), gathered as float64, and put through one softmax with the
sink. Nothing is shared with the backends, not even the per-token bounds, and no row that is not
visible is ever read: whatever it holds cannot reach a result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients


class VisibleRows(NamedTuple):
    """The keys one query row sees, as row numbers of ``local_kv`` and of ``sparse_kv``.

    ``pool`` is a multiset: a slot index that occurs twice is listed twice.
    """

    local: list[int]
    pool: list[int]


class Row(NamedTuple):
    """One query row ``(batch, token)`` in float64, heads grouped by their KV head.

    Attributes:
        batch, token: which row.
        visible: the keys it sees.
        query: ``[G, H/G, D]``.
        keys: ``[G, N, D]``, the ``N`` visible rows, window first.
        weights: ``[G, H/G, N]``, ``exp(z - lse)``; 0 for heads whose sink is +inf.
        sink_weight: ``[G, H/G]``, ``exp(sink - lse)``; 0 for heads whose sink is +inf.
        scores: ``[G, H/G, N]``, ``z = scale * <query, key>``.
        lse: ``[G, H/G]``, the sink included.
        output: ``[G, H/G, D]``.
    """

    batch: int
    token: int
    visible: VisibleRows
    query: Tensor
    keys: Tensor
    weights: Tensor
    sink_weight: Tensor
    scores: Tensor
    lse: Tensor
    output: Tensor


def visible_rows(call: Call) -> list[list[VisibleRows]]:
    """The keys that every query row of ``call`` sees, as ``[B][T]`` lists, on the host."""
    batch, _, tokens, _ = call.query.shape
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    window, ratio = call.sliding_window_size, call.compress_ratio
    slots = None if call.kv_indices is None else call.kv_indices.tolist()
    offsets = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
    pool_offsets = None if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
    ids = None if call.doc_ids is None else call.doc_ids.tolist()

    def one_row(b: int, t: int) -> VisibleRows:
        # The document's first token, and its span [pool_low, pool_high) of the pool.
        first, pool_low, pool_high = 0, 0, pool
        if offsets is not None:
            document = _document_of(t, offsets)
            if document is None:
                return VisibleRows([], [])
            first = offsets[document]
            if pool_offsets is not None:
                pool_low, pool_high = pool_offsets[document], pool_offsets[document + 1]

        local = [
            j
            for j in range(max(first, t - window + 1, 0), t + 1)
            if ids is None or ids[b][j] == ids[b][t]
        ]
        if call.sparse_kv is None:
            return VisibleRows(local, [])
        length = pool_high - pool_low
        if slots is not None:
            return VisibleRows(local, [pool_low + i for i in slots[b][t] if 0 <= i < length])
        if ratio is None:
            raise ValueError("a call with sparse_kv needs kv_indices or compress_ratio")
        complete = [j for j in range(length) if j < (t - first + 1) // ratio]
        if ids is not None:
            complete = [j for j in complete if ids[b][j * ratio] == ids[b][t]]
        return VisibleRows(local, [pool_low + j for j in complete])

    return [[one_row(b, t) for t in range(tokens)] for b in range(batch)]


def _document_of(token: int, offsets: list[int]) -> int | None:
    """The document that holds ``token``; None past the last offset. Empty ones hold nothing."""
    for document in range(len(offsets) - 1):
        if offsets[document] <= token < offsets[document + 1]:
            return document
    return None


def oracle_rows(call: Call, tokens: Collection[int] | None = None) -> Iterator[Row]:
    """Every query row that sees at least one key, with its softmax worked out in float64.

    ``tokens`` leaves out all rows but these, of every batch entry.
    """
    groups = call.local_kv.shape[1]
    heads, head_dim = call.query.shape[1], call.query.shape[3]
    shape = (groups, heads // groups)
    sink = None if call.attention_sink is None else call.attention_sink.detach().double()
    sink = None if sink is None else sink.reshape(shape)
    query = call.query.detach()
    for b, rows in enumerate(visible_rows(call)):
        for t, visible in enumerate(rows):
            if not visible.local and not visible.pool:
                continue
            if tokens is not None and t not in tokens:
                continue
            keys = _take(call.local_kv, b, visible.local)
            if call.sparse_kv is not None:
                keys = torch.cat([keys, _take(call.sparse_kv, b, visible.pool)], dim=1)
            q = query[b, :, t].double().reshape(*shape, head_dim)
            scores = call.scale * (q @ keys.mT)
            weights, sink_weight, lse = _softmax_with_sink(scores, sink)
            output = weights @ keys
            yield Row(b, t, visible, q, keys, weights, sink_weight, scores, lse, output)


def _take(kv: Tensor, batch: int, rows: list[int]) -> Tensor:
    """Rows ``[G, N, D]`` of one batch entry, as float64."""
    index = torch.tensor(rows, device=kv.device, dtype=torch.int64)
    return kv.detach()[batch].index_select(1, index).double()


def _softmax_with_sink(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, the sink's weight and ``lse = log(sum_j exp(z_j) + exp(sink))``.

    For scores ``z`` ``[G, H/G, N]``. Weights are divided by the sum they belong to, and not
    taken as ``exp(z - lse)``: the rounding of a huge lse would keep them from adding up to 1.
    A sink of +inf takes the limit: lse is +inf and every weight 0.
    """
    largest = scores.max(dim=-1).values
    if sink is None:
        sink = torch.full_like(largest, -math.inf)
    takes_all = sink == math.inf
    largest = torch.where(takes_all, 0.0, torch.maximum(largest, sink))
    weights = torch.exp(scores - largest[..., None])
    sink_weight = torch.exp(sink - largest)
    total = weights.sum(-1) + sink_weight
    lse = largest + torch.log(total)
    weights = torch.where(takes_all[..., None], 0.0, weights / total[..., None])
    return weights, torch.where(takes_all, 0.0, sink_weight / total), lse


def oracle_forward(call: Call, tokens: Collection[int] | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse by definition; with ``tokens`` only those query rows are worked out.

    Returns:
        output: float64 ``[B, H, T, D]``; 0 in rows that see no key.
        lse: float64 ``[B, H, T]``, natural log, sink included; the sink (or -inf) in rows that
            see no key.
    """
    output = torch.zeros(call.query.shape, dtype=torch.float64, device=call.query.device)
    lse = torch.full(call.query.shape[:3], -math.inf, dtype=torch.float64).to(output.device)
    if call.attention_sink is not None:
        lse[:] = call.attention_sink.detach().double()[None, :, None]
    for row in oracle_rows(call, tokens):
        output[row.batch, :, row.token] = row.output.flatten(0, 1)
        lse[row.batch, :, row.token] = row.lse.flatten()
    return output, lse


def oracle_gradients(
    call: Call, grad_output: Tensor, tokens: Collection[int] | None = None
) -> Gradients:
    """Gradients of ``sum(output * grad_output)`` by the softmax's own derivative.

    With ``p_j = exp(z_j - lse)``, ``dp_j = <grad_output, value_j>`` and
    ``delta = <grad_output, output>``::

        dz_j   = p_j * (dp_j - delta)
        dquery = scale * sum_j dz_j key_j
        dkv_j  = scale * dz_j query + p_j grad_output        (key and value are one tensor)
        dsink  = -exp(sink - lse) * delta

    summed over heads, rows and repeated slots. Rows that see no key, and heads whose sink is
    +inf, add nothing whatever ``grad_output`` holds there. With ``tokens`` only those query rows
    add anything.

    Returns:
        Gradients as float64, each in its input's shape; None where the call has no such input.
    """
    sink = call.attention_sink

    def zeros(like: Tensor | None) -> Tensor | None:
        return (
            None if like is None else torch.zeros(like.shape, dtype=torch.float64).to(like.device)
        )

    grads = Gradients(zeros(call.query), zeros(call.local_kv), zeros(call.sparse_kv), zeros(sink))
    assert grads.query is not None
    assert grads.local_kv is not None
    for row in oracle_rows(call, tokens):
        grad = grad_output.detach()[row.batch, :, row.token].double().reshape(row.output.shape)
        alive = row.lse != math.inf
        grad = torch.where(alive[..., None], grad, 0.0)
        delta = (grad * row.output).sum(-1, keepdim=True)
        dz = row.weights * (grad @ row.keys.mT - delta)
        grads.query[row.batch, :, row.token] = (call.scale * dz @ row.keys).flatten(0, 1)
        dkv = call.scale * dz.mT @ row.query + row.weights.mT @ grad
        cut = len(row.visible.local)
        _add(grads.local_kv[row.batch], row.visible.local, dkv[:, :cut])
        if grads.sparse_kv is not None:
            _add(grads.sparse_kv[row.batch], row.visible.pool, dkv[:, cut:])
        if grads.attention_sink is not None:
            grads.attention_sink.sub_((row.sink_weight * delta[..., 0]).flatten())
    return grads


def _add(total: Tensor, rows: list[int], values: Tensor) -> None:
    """Add ``values`` ``[G, N, D]`` to ``rows`` of ``total`` ``[G, S, D]``, repeats adding up."""
    total.index_add_(1, torch.tensor(rows, device=total.device, dtype=torch.int64), values)
