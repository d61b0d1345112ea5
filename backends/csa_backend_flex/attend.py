"""FlexAttention over a call's rows, and the sink, which goes in through lse.

FlexAttention leaves the sink out: with ``lse'`` and ``out'`` of it, and ``share`` the sink's part
of the denominator,

    lse = log(exp(lse') + exp(sink)),  share = exp(sink - lse),  output = (1 - share) out'

and backward, with ``delta = <grad_output, output>``,

    dout' = (1 - share) grad_output,  dlse' = share delta,  dsink = -sum(share delta)
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from csa_dispatch import Call, Gradients, enable_autograd, plain_dispatch

from .masks import block_mask_for, padded
from .rows import Rows, build_rows
from .spans import Spans, spans_of

Needs = tuple[bool, bool, bool, bool]

RECOMPILES = 1024
"""Dtypes, head counts and lengths one process may compile for; past torch's default of 8 it
would not run."""


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of a call; see ``csa_dispatch.Backend.forward``."""
    output = torch.empty_like(call.query)
    spans = spans_of(call)
    rows, seen = build_rows(call, spans), _seen(spans)
    query, mask = _query(call, seen), block_mask_for(call, spans)
    with plain_dispatch(), torch.no_grad():
        result, lse = _run(query, rows.table, mask, call.scale)
    total = torch.where(seen, lse, -math.inf)
    if call.attention_sink is not None:
        sink = call.attention_sink.detach().to(lse.dtype)[:, None]
        total = torch.logaddexp(total, sink)
    lasting = torch.where(seen & total.isfinite(), torch.exp(lse - total), 0)
    odd = _by_head(rows.poison.tokens, call)
    scaled = torch.where(lasting[..., None] > 0, result * lasting[..., None], 0)
    output.copy_(scaled.masked_fill(odd[..., None], math.nan))
    return output, total.masked_fill(odd, math.nan).contiguous()


def backward(
    call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, needs: Needs
) -> Gradients:
    """The gradients asked for, through FlexAttention's own backward of a recomputed forward."""
    spans = spans_of(call)
    rows, seen = build_rows(call, spans), _seen(spans)
    odd = _by_head(rows.poison.tokens, call)
    sink = call.attention_sink
    share = torch.zeros_like(lse)
    if sink is not None:
        logit = sink.detach().to(lse.dtype)[:, None]
        share = torch.where(logit == math.inf, 1.0, torch.exp(logit - lse))
    alive = (seen & (lse != math.inf) & ~odd)[..., None]
    upstream = torch.where(alive, grad_output, 0)
    kept = torch.where(alive, output, 0)
    delta = (upstream * kept).sum(-1, dtype=lse.dtype)
    share = torch.where(alive[..., 0], share, 0)
    grad_result = upstream * (1 - share)[..., None].to(upstream.dtype)
    query, table = _query(call, seen), rows.table
    wanted = [tensor for tensor, need in ((query, needs[0]), (table, any(needs[1:3]))) if need]
    found = iter(())
    if wanted:
        mask = block_mask_for(call, spans)
        with enable_autograd():
            for tensor in wanted:
                tensor.requires_grad_()
            results = _run(query, table, mask, call.scale)
            found = iter(torch.autograd.grad(results, wanted, (grad_result, share * delta)))
    grad_query = next(found).masked_fill(odd[..., None], math.nan) if needs[0] else None
    local, pool = (None, None)
    if any(needs[1:3]):
        local, pool = _split(call, rows, next(found), needs)
    grad_sink = None
    if needs[3] and sink is not None:
        total = -(share * delta).sum((0, 2))
        spoiled = odd.any(-1).any(0) & (sink != math.inf)
        grad_sink = total.masked_fill(spoiled, math.nan).to(sink.dtype)
    return Gradients(grad_query, local, pool, grad_sink)


def _split(
    call: Call, rows: Rows, grad: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``local_kv`` and ``sparse_kv`` from the table's."""
    tokens = call.query.shape[2]
    local = pool = None
    if needs[1]:
        local = grad[:, :, :tokens].masked_fill(rows.poison.local[..., None], math.nan)
    if needs[2] and rows.poison.pool is not None:
        pool = grad[:, :, padded(tokens) :].masked_fill(rows.poison.pool[..., None], math.nan)
    return local, pool


def _run(query: Tensor, table: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """FlexAttention's output and lse, without the sink."""
    # What a dispatch mode sees is not compiled.
    with _disable_current_modes(), warnings.catch_warnings():
        if query.is_cuda:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
                return _compiled()(query, table, mask, scale)
        # It warns that it is not compiled; on a CPU lse comes only so.
        warnings.simplefilter("ignore")
        return _flex(query, table, mask, scale)


def _flex(query: Tensor, table: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    output, aux = flex.flex_attention(
        query,
        table,
        table,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != table.shape[1],
        return_aux=flex.AuxRequest(lse=True),
        # Few queries would take a kernel for decoding, which knows fewer shapes.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if query.is_cuda else None,
    )
    assert aux.lse is not None
    return output, aux.lse


@lru_cache(maxsize=1)
def _compiled():
    return torch.compile(_flex, fullgraph=True)


def _query(call: Call, seen: Tensor) -> Tensor:
    """A query to differentiate; rows without keys are zeros, since they may hold NaN."""
    query = call.query.detach()
    if call.sliding_window_size and call.cu_seqlens is None:
        return query
    return torch.where(seen[..., None], query, 0)


def _seen(spans: Spans) -> Tensor:
    """``[B or 1, 1, T]``: the token sees any row."""
    seen = ~spans.local.empty
    if spans.pool is not None:
        seen = seen | ~spans.pool.empty
    return seen[:, None]


def _by_head(tokens: Tensor, call: Call) -> Tensor:
    """``[B, G, T]`` as ``[B, H, T]``."""
    return tokens.repeat_interleave(call.query.shape[1] // tokens.shape[1], dim=1)
