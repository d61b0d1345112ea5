"""Plain eager PyTorch: the obvious differentiable implementation, the yardstick of the budgets.

Every query row gathers its keys (unused slots read a row of zeros), scores and softmax are fp32
(fp64 for fp64 inputs), the probabilities are rounded to the value's dtype before they weigh the
values, and the results are rounded once to the input's dtype. Gradients are autograd's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, token_bounds
from csa_dispatch.recompute import enable_autograd

_CHUNK_ELEMENTS = 1 << 26
"""Gathered key elements of one chunk of query rows in ``plain_gradients``: 256 MiB of fp32."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, D]`` in the query's dtype and lse ``[B, H, T]``, both differentiable.

    Gathers ``[B, G, T, N, D]`` keys at once, so it is for small calls.
    """
    return _attend(call.query, _padded_kv(call), visible_table(call), call.attention_sink, call)


def plain_forward(call: Call) -> tuple[Tensor, Tensor]:
    """``plain_attention`` without autograd, a chunk of query rows at a time."""
    with torch.no_grad():
        kv, table = _padded_kv(call), visible_table(call)
        pieces = [
            _attend(call.query[:, :, low:high], kv, table[:, low:high], call.attention_sink, call)
            for low, high in _chunks(call, table)
        ]
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def plain_gradients(call: Call, grad_output: Tensor) -> Gradients:
    """Autograd's gradients of ``plain_attention``, a chunk of query rows at a time.

    KV and sink gradients add up over the chunks in fp32 (fp64 for fp64) and are rounded once.
    Works where autograd is off, as inside another backward.
    """
    exact = accumulation_dtype(call.query.dtype)
    table = visible_table(call)
    kv = _padded_kv(call).detach().to(exact).requires_grad_()
    sink = call.attention_sink
    sink = None if sink is None else sink.detach().to(exact).requires_grad_()
    shared = [kv] if sink is None else [kv, sink]
    totals = [torch.zeros_like(leaf) for leaf in shared]
    dquery = []
    with enable_autograd():
        for low, high in _chunks(call, table):
            query = call.query[:, :, low:high].detach().requires_grad_()
            out, _ = _attend(query, kv, table[:, low:high], sink, call)
            found = torch.autograd.grad(out, [query, *shared], grad_output[:, :, low:high])
            dquery.append(found[0])
            for total, piece in zip(totals, found[1:], strict=True):
                total += piece
    tokens, dtype = call.query.shape[2], call.query.dtype
    dkv = totals[0].to(dtype)
    pool = call.sparse_kv
    return Gradients(
        torch.cat(dquery, 2),
        dkv[:, :, :tokens],
        None if pool is None else dkv[:, :, tokens : tokens + pool.shape[2]],
        None if call.attention_sink is None else totals[1].to(call.attention_sink.dtype),
    )


def visible_table(call: Call) -> Tensor:
    """Rows every query sees in ``cat(local_kv, sparse_kv, zeros)``: int64 ``[B, T, N]``.

    The last row, of zeros, stands in unused places; ``N`` is window plus slots.
    """
    batch, _, tokens, _ = call.query.shape
    device = call.query.device
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    unused = tokens + pool
    bounds = token_bounds(call)
    token = torch.arange(tokens, device=device)[:, None]
    back = torch.arange(min(call.sliding_window_size, tokens), device=device)
    first = 0 if bounds is None else bounds.window_start[..., None]
    local = (token - back).expand(batch, -1, -1)
    local = torch.where(local >= first, local, unused)
    if call.kind is Kind.WINDOW:
        return local
    if bounds is None or bounds.pool_start is None or bounds.pool_end is None:
        low, high = token.new_zeros(()), token.new_full((), pool)
    else:
        low, high = bounds.pool_start.long()[..., None], bounds.pool_end.long()[..., None]
    if call.kv_indices is None:
        row = torch.arange(pool, device=device).expand(batch, tokens, -1)
        used = (row >= low) & (row < high)
    else:
        row = call.kv_indices.long()
        used = (row >= 0) & (row < high - low)
        row = row + low
    return torch.cat([local, torch.where(used, tokens + row, unused)], dim=-1)


def _padded_kv(call: Call) -> Tensor:
    """``[B, G, T + S + 1, D]``: the local rows, the pool, and one row of zeros."""
    pool = call.local_kv[:, :, :0] if call.sparse_kv is None else call.sparse_kv
    zero = call.local_kv.new_zeros(*call.local_kv.shape[:2], 1, call.local_kv.shape[3])
    return torch.cat([call.local_kv, pool, zero], dim=2)


def _chunks(call: Call, table: Tensor) -> list[tuple[int, int]]:
    """Spans of query rows whose gathered keys stay within ``_CHUNK_ELEMENTS``."""
    batch, groups, tokens, head_dim = call.local_kv.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * groups * table.shape[-1] * head_dim))
    spans = [(low, min(low + step, tokens)) for low in range(0, tokens, step)]
    return spans or [(0, 0)]


def _attend(
    query: Tensor, kv: Tensor, table: Tensor, sink: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` ``[B, H, T, D]`` over the rows of ``kv`` that ``table`` names."""
    _, heads, tokens, head_dim = query.shape
    groups = kv.shape[1]
    exact = accumulation_dtype(query.dtype)
    pick = table[:, None, :, :, None].expand(-1, groups, -1, -1, head_dim).flatten(2, 3)
    keys = kv.to(exact).gather(2, pick).unflatten(2, (tokens, table.shape[-1]))
    q = query.to(exact).unflatten(1, (groups, heads // groups))

    used = (table != kv.shape[2] - 1)[:, None, None]
    scores = call.scale * torch.einsum("bghtd,bgtnd->bghtn", q, keys)
    scores = scores.masked_fill(~used, -math.inf)
    if sink is None:
        logit = scores.new_full((), -math.inf).expand(1, groups, heads // groups, 1)
    else:
        logit = sink.to(exact).reshape(1, groups, heads // groups, 1)
    # Rows without keys and heads whose sink is +inf have a fixed answer and no gradient.
    settled = ~used.any(-1) | (logit == math.inf)
    scores = torch.where(settled[..., None], 0.0, scores)
    sink_score = torch.where(settled, 0.0, logit)
    both = torch.cat([scores, sink_score[..., None]], dim=-1)
    largest = both.max(-1, keepdim=True).values.detach()
    weights = torch.exp(both - largest)
    total = weights.sum(-1, keepdim=True)
    probability = (weights / total)[..., :-1]
    # Rounded forward, straight through backward: casting the gradient too would overflow fp16.
    rounded = probability.detach().to(query.dtype).to(exact)
    probability = probability + (rounded - probability.detach())
    out = torch.einsum("bghtn,bgtnd->bghtd", probability, keys)
    out = torch.where(settled[..., None], 0.0, out)
    lse = torch.where(settled, logit, (largest + torch.log(total))[..., 0])
    return out.flatten(1, 2).to(query.dtype), lse.flatten(1, 2)
