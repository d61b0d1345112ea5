"""Calls of the fused side on CUDA that keep our semantics, for any version from 0.0.13 on.

Forward and backward go through the public ``gather_attn``; the backward recomputes the forward.
Departures closed here: sinks of -inf give NaN in empty rows (0.0.13), sinks of +inf everywhere;
rows past the last offset see each other; NaN spreads within tiles (``odd_rows``); versions without
offsets get document numbers and slots through the whole pool instead.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, Gradients, Kind, enable_autograd, token_bounds

from .features import known_features
from .odd_rows import OddRows, Seen, by_head, spoil, without_odd_rows
from .sides import CUTE

Needs = tuple[bool, bool, bool, bool]

FAR = 1e30
"""Sinks are kept within this of zero: beyond any logit, and still a number."""

IMPL = "fused"


class _Fused(NamedTuple):
    """A call's tensors as ``gather_attn`` gets them.

    Attributes:
        inputs: query, local_kv, sparse_kv and sink, whose gradients are taken.
        arguments: the keywords, documents included.
        slots: what kv_indices holds.
        seen: bool ``[B, 1, T]``: the token sees any row.
        odd: what rows that are not finite spoil.
    """

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    arguments: dict[str, Any]
    slots: Tensor
    seen: Tensor
    odd: OddRows


def forward(call: Call, side: str, recompute_p: bool) -> tuple[Tensor, Tensor]:
    """Output and lse of a call; see ``csa_dispatch.Backend.forward``."""
    fused = _prepare(call, side, recompute_p)
    with torch.no_grad():
        result, lse = _run(fused, return_lse=True)
    assert lse is not None
    heads, sink = call.query.shape[1], call.attention_sink
    odd = by_head(fused.odd.tokens, heads)
    logit = torch.full((heads,), -math.inf, device=lse.device)
    if sink is not None:
        logit = sink.detach().float()
    logit = logit[:, None]
    lse = torch.where(fused.seen & (logit != math.inf), lse, logit)
    output = torch.empty_like(call.query)
    alive = (fused.seen & (lse != math.inf))[..., None]
    output.copy_(spoil(torch.where(alive, result, 0), odd))
    return output, lse.masked_fill(odd & (lse != math.inf), math.nan).contiguous()


def backward(
    call: Call, grad_output: Tensor, needs: Needs, side: str, recompute_p: bool
) -> Gradients:
    """The gradients asked for, through ``gather_attn``'s own autograd."""
    fused = _prepare(call, side, recompute_p)
    sink = call.attention_sink
    takes_all = torch.zeros((), dtype=torch.bool, device=call.query.device)
    if sink is not None:
        takes_all = (sink.detach() == math.inf)[None, :, None]
    wanted = [leaf for leaf, need in zip(fused.inputs, needs, strict=True) if need]
    with enable_autograd():
        for leaf in wanted:
            leaf.requires_grad_()
        output, _ = _run(fused, return_lse=False)
        alive = (fused.seen & ~takes_all)[..., None]
        upstream = torch.where(alive, grad_output, 0)
        found = iter(torch.autograd.grad(output, wanted, upstream))
    query, local, pool, logit = (next(found) if need else None for need in needs)
    odd = by_head(fused.odd.tokens, call.query.shape[1])
    if query is not None:
        query = spoil(torch.where(alive, query, 0), odd)
    if local is not None:
        local = spoil(local, fused.odd.local)
    if pool is not None and call.sparse_kv is not None:
        pool = spoil(pool[:, :, : call.sparse_kv.shape[2]], fused.odd.pool)
    if logit is not None and sink is not None:
        spoiled = odd.any(-1).any(0) & (sink.detach() != math.inf)
        logit = torch.where(sink.detach().isinf(), 0, logit)
        logit = logit.masked_fill(spoiled, math.nan).to(sink.dtype)
    return Gradients(query, local, pool, logit)


def _prepare(call: Call, side: str, recompute_p: bool) -> _Fused:
    features = known_features()
    batch, heads, tokens, _ = call.query.shape
    start, seen = _seen(call)
    sparse_kv = call.sparse_kv
    if sparse_kv is None:
        sparse_kv = call.local_kv[:, :, :0]
    odd = without_odd_rows(call.local_kv.detach(), sparse_kv.detach(), seen)
    pool, slots = odd.sparse_kv, seen.slots
    arguments: dict[str, Any] = {"sliding_window_size": min(call.sliding_window_size, tokens)}
    if features.packed_offsets:
        if call.cu_seqlens is not None:
            offsets = call.cu_seqlens_k
            if offsets is None:
                offsets = torch.zeros_like(call.cu_seqlens)
            # Slots count from a document's span, as the caller's did.
            slots = torch.where(slots >= 0, slots - start, -1)
            arguments["cu_seqlens"] = call.cu_seqlens.clamp(min=0)
            arguments["cu_seqlens_k"] = offsets.clamp(0, sparse_kv.shape[2])
    else:
        if call.cu_seqlens is not None:
            token = torch.arange(tokens, device=slots.device)
            bounds = call.cu_seqlens[1:].contiguous()
            arguments["doc_ids"] = torch.searchsorted(bounds, token, right=True)[None]
        # It wants no more slots than rows; further rows are never selected.
        lack = max(0, slots.shape[2] - pool.shape[2])
        pool = torch.nn.functional.pad(pool, (0, 0, 0, lack))
    if IMPL == "fused":
        options: dict[str, Any] = {"backend": "cute" if side == CUTE else "triton"}
        if side == CUTE and features.keeps_probabilities:
            options["bwd_recompute_p"] = recompute_p
        arguments["kernel_options"] = options
    arguments["scale"] = call.scale
    some = seen.any()[:, None]
    query = call.query.detach()
    if not call.sliding_window_size or call.cu_seqlens is not None:
        query = torch.where(some[..., None], query, 0)  # rows without keys may hold NaN
    sink = call.query.new_full((heads,), -FAR, dtype=torch.float32)
    if call.attention_sink is not None:
        sink = call.attention_sink.detach().float().clamp(-FAR, FAR)
    # Views of the caller's tensors are made leaves of their own.
    inputs = (query.view_as(query).detach(), odd.local_kv, pool, sink.contiguous())
    return _Fused(inputs, arguments, slots.expand(batch, -1, -1), some, odd)


def _run(fused: _Fused, *, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    from attn_gym.sparse.gather_attn import AuxRequest, gather_attn

    query, local_kv, sparse_kv, sink = fused.inputs
    result = gather_attn(
        query,
        local_kv,
        sparse_kv,
        fused.slots,
        sink,
        impl=IMPL,
        return_aux=AuxRequest(lse=True) if return_lse else None,
        **fused.arguments,
    )
    if isinstance(result, tuple):
        return result[0], result[1].lse
    return result, None


def _seen(call: Call) -> tuple[Tensor | int, Seen]:
    """First pool row of each token's document ``[B, T, 1]``, and what the token sees."""
    batch, _, tokens, _ = call.query.shape
    device = call.query.device
    rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    bounds = token_bounds(call)
    token = torch.arange(tokens, device=device, dtype=torch.int32)
    low = (token - min(call.sliding_window_size, tokens) + 1).clamp(min=0)[None]
    if not call.sliding_window_size:
        low = token[None] + 1
    start: Tensor | int = 0
    length: Tensor | int = rows
    if bounds is not None:
        low = torch.maximum(low, bounds.window_start)
        if bounds.pool_start is not None and bounds.pool_end is not None:
            start = bounds.pool_start[..., None]
            length = (bounds.pool_end - bounds.pool_start)[..., None]
    if call.kind is Kind.WINDOW:
        return start, Seen(low, low.new_empty(batch, tokens, 0))
    slot = call.kv_indices
    if slot is None:
        assert call.compress_ratio is not None
        packed = call.cu_seqlens is not None
        columns = rows if packed else min(rows, tokens // call.compress_ratio)
        slot = torch.arange(columns, device=device, dtype=torch.int32)
        slot = slot.expand(batch, tokens, columns)
    used = (slot >= 0) & (slot < length)
    return start, Seen(low, torch.where(used, slot + start, -1).to(torch.int32))
