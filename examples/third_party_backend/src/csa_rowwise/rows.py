"""Forward and backward of one query row after the other.

With logits ``z = scale * query . key`` over the keys that a row sees, key and value being one::

    p      = exp(z - lse)              delta = output . grad_output
    dz     = p * (grad_output . key - delta)
    dquery = scale * dz . key          dkey  = scale * dz^T . query + p^T . grad_output
    dsink  = -exp(sink - lse) * delta
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, Gradients


class Row(NamedTuple):
    """One query row and the keys it sees.

    Attributes:
        batch, token: which row.
        window: rows of local_kv, as a slice.
        slots: rows of sparse_kv ``[N]`` int64, a repeated one as often as it is selected.
        keys: ``[M, D]`` of both, in the accumulation dtype.
        scores: ``[H, M]``, scaled.
    """

    batch: int
    token: int
    window: slice
    slots: Tensor
    keys: Tensor
    scores: Tensor


def accumulation_dtype(call: Call) -> torch.dtype:
    """float64 for float64 queries, else float32."""
    return torch.float64 if call.query.dtype == torch.float64 else torch.float32


def sink_of(call: Call) -> Tensor:
    """The sink ``[H]`` in the accumulation dtype; no sink is one of -inf."""
    exact = accumulation_dtype(call)
    if call.attention_sink is None:
        return call.query.new_full((call.query.shape[1],), -math.inf, dtype=exact)
    return call.attention_sink.to(exact)


def rows(call: Call) -> Iterator[Row]:
    """Every query row that sees a key."""
    exact = accumulation_dtype(call)
    batches, _, tokens, _ = call.query.shape
    for batch in range(batches):
        local = call.local_kv[batch, 0]
        pool = local[:0] if call.sparse_kv is None else call.sparse_kv[batch, 0]
        for token in range(tokens):
            window = slice(max(0, token - call.sliding_window_size + 1), token + 1)
            slots = torch.zeros(0, dtype=torch.int64)
            if call.kv_indices is not None:
                slots = call.kv_indices[batch, token].long()
                slots = slots[(slots >= 0) & (slots < len(pool))]
            keys = torch.cat([local[window], pool[slots]]).to(exact)
            if len(keys):
                query = call.query[batch, :, token].to(exact)
                yield Row(batch, token, window, slots, keys, call.scale * query @ keys.T)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output like the query, and lse ``[B, H, T]``."""
    sink = sink_of(call)
    # Rows without keys keep these: output 0, lse the sink.
    output = torch.zeros_like(call.query)
    lse = sink[:, None].repeat(call.query.shape[0], 1, call.query.shape[2])
    open_heads = sink < math.inf  # a sink of +inf takes all
    for row in rows(call):
        logits = torch.cat([row.scores, sink[:, None]], 1)
        total = logits.logsumexp(1)
        # Not exp(scores - total): a large total has lost the digits that matter here.
        weights = logits.softmax(1)[:, :-1].to(call.query.dtype)
        attended = (weights.to(row.keys.dtype) @ row.keys).to(call.query.dtype)
        output[row.batch, open_heads, row.token] = attended[open_heads]
        lse[row.batch, open_heads, row.token] = total[open_heads]
    return output, lse


def backward(call: Call, output: Tensor, lse: Tensor, grad_output: Tensor) -> Gradients:
    """All gradients, in the dtypes of their inputs; None where the call has no such input."""
    exact = accumulation_dtype(call)
    sink = sink_of(call)
    dquery, dlocal = (torch.zeros_like(kv, dtype=exact) for kv in (call.query, call.local_kv))
    dpool = None if call.sparse_kv is None else torch.zeros_like(call.sparse_kv, dtype=exact)
    dsink = torch.zeros_like(sink)
    open_heads = sink < math.inf
    for row in rows(call):
        here = (row.batch, open_heads, row.token)
        query, grad = call.query[here].to(exact), grad_output[here].to(exact)
        delta = (output[here].to(exact) * grad).sum(1, keepdim=True)
        weights = torch.exp(row.scores[open_heads] - lse[here][:, None])
        dz = call.scale * weights * (grad @ row.keys.T - delta)
        dquery[here] = dz @ row.keys
        dkeys = dz.T @ query + weights.T @ grad
        window = len(row.keys) - len(row.slots)
        dlocal[row.batch, 0, row.window] += dkeys[:window]
        if dpool is not None:
            dpool[row.batch, 0].index_add_(0, row.slots, dkeys[window:])
        dsink[open_heads] -= torch.exp(sink[open_heads] - lse[here]) * delta[:, 0]
    return Gradients(
        dquery.to(call.query.dtype),
        dlocal.to(call.local_kv.dtype),
        None if dpool is None or call.sparse_kv is None else dpool.to(call.sparse_kv.dtype),
        None if call.attention_sink is None else dsink.to(call.attention_sink.dtype),
    )
