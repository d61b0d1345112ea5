"""One attention call as a backend sees it: canonical BHSD tensors and the documents' bounds."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(str, Enum):
    """The three V4 layer kinds one entry point serves."""

    WINDOW = "window"
    GATHER = "gather"
    DENSE = "dense-compressed"


class Call(NamedTuple):
    """The tensors and scalars of one validated call, in canonical layout.

    Tensors are views of the caller's: strides are arbitrary, expanded tensors included.
    Backends only read them.

    Attributes:
        query: ``[B, H, T, D]`` fp64, fp32, bf16 or fp16.
        local_kv: ``[B, G, T, D]``, the query's dtype. ``G`` divides ``H``; query head ``h``
            reads KV head ``h // (H // G)``. Key and value are this same tensor.
        sparse_kv: ``[B, G, S, D]`` pool, or None for the window kind.
        kv_indices: ``[B, T, K]`` int32 or int64 slots into the pool, or None. A slot is
            unused when negative or at or past its document's pool length.
        attention_sink: ``[H]`` in the query's dtype or fp32, an unscaled logit that counts in
            the denominator alone, or None.
        cu_seqlens: int32 ``[N + 1]`` document offsets along T (``B`` is 1), or None. Negative for
            documents that began before row 0.
        cu_seqlens_k: int32 ``[N + 1]`` document offsets along S, or None.
        doc_ids: integer ``[B, T]``, non-decreasing along T, or None.
        sliding_window_size: tokens in the window, the query's own included; 0 for no window.
        compress_ratio: tokens per pool entry (dense-compressed kind), else None.
        scale: positive multiplier of query-key dot products.
    """

    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor | None
    kv_indices: Tensor | None
    attention_sink: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    doc_ids: Tensor | None
    sliding_window_size: int
    compress_ratio: int | None
    scale: float

    @property
    def kind(self) -> Kind:
        if self.sparse_kv is None:
            return Kind.WINDOW
        return Kind.DENSE if self.kv_indices is None else Kind.GATHER


class Gradients(NamedTuple):
    """Gradients of one call; a field is None when it was not asked for.

    Each has the shape and dtype of its input. Which ones are wanted is given by a mask of the
    same field order: query, local_kv, sparse_kv, attention_sink.
    """

    query: Tensor | None
    local_kv: Tensor | None
    sparse_kv: Tensor | None
    attention_sink: Tensor | None


class TokenBounds(NamedTuple):
    """What each query token may see, as int32 ``[B, T]`` tensors on the query's device.

    Attributes:
        window_start: first row of ``local_kv`` of the token's document. The token's window is
            ``max(window_start, t - W + 1) .. t``. For rows past the last document offset it is
            ``t + 1``: they see nothing.
        pool_start, pool_end: rows of ``sparse_kv``. Gather kind: the document's span, so slot
            ``i`` is used iff ``0 <= i < pool_end - pool_start`` and reads row
            ``pool_start + i``. Dense-compressed kind: exactly the visible entries, causality
            applied. Both None for the window kind.
    """

    window_start: Tensor
    pool_start: Tensor | None
    pool_end: Tensor | None


def token_bounds(call: Call) -> TokenBounds | None:
    """Per-token bounds of a packed or dense-compressed call, computed on device without a sync.

    Returns None when no table is needed: no documents and not dense-compressed. Then the
    window starts at 0 and slots address the whole pool. For dense-compressed without documents
    the visible entries are ``0 .. min(S, (t + 1) // r)``, returned as a table all the same.

    Source: DESIGN "Packed documents" (cu_seqlens) and the doc_ids rule of torchtitan's V4 port.
    """
    query, ratio = call.query, call.compress_ratio
    dense = call.kind is Kind.DENSE
    if call.cu_seqlens is None and call.doc_ids is None and not dense:
        return None
    batch, tokens = query.shape[0], query.shape[2]
    position = torch.arange(tokens, device=query.device, dtype=torch.int32)
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]

    if call.cu_seqlens is not None:
        return _packed_bounds(call, position)
    if call.doc_ids is not None:
        changed = torch.zeros(batch, tokens, device=query.device, dtype=torch.bool)
        changed[:, 1:] = call.doc_ids[:, 1:] != call.doc_ids[:, :-1]
        start = torch.where(changed, position, 0).cummax(dim=1).values.to(torch.int32)
    else:
        start = position.new_zeros(()).expand(batch, tokens)
    if call.sparse_kv is None:
        return TokenBounds(start, None, None)
    if not dense:
        zero = position.new_zeros(()).expand(batch, tokens)
        return TokenBounds(start, zero, position.new_full((), pool).expand(batch, tokens))
    assert ratio is not None
    end = ((position + 1) // ratio).clamp(max=pool).expand(batch, tokens)
    first = -(-start // ratio)  # rounded up, without a sum that could overflow
    return TokenBounds(start, torch.minimum(first, end), end)


def begun_before(first: int, query: Tensor, sparse_kv: Tensor) -> tuple[Tensor, Tensor]:
    """cu_seqlens and cu_seqlens_k of one document whose tokens from ``first`` on are the query's.

    Its pool is all of ``sparse_kv``. Nothing waits for the device, as for a tensor made of a list.
    """
    end, made = query.shape[2], {"dtype": torch.int32, "device": query.device}
    offsets = torch.arange(-first, end + 1, end + first, **made)
    return offsets, torch.arange(2, **made) * sparse_kv.shape[2]


def _packed_bounds(call: Call, position: Tensor) -> TokenBounds:
    assert call.cu_seqlens is not None
    offsets = call.cu_seqlens
    # Rows past the last offset get document N, whose clamped spans below are empty.
    document = torch.searchsorted(offsets[1:].contiguous(), position, right=True)
    documents = offsets.shape[0] - 1
    spare = document >= documents
    document = document.clamp(max=documents - 1)
    start = offsets[document]
    window_start = torch.where(spare, position + 1, start.clamp(min=0))
    if call.sparse_kv is None:
        return TokenBounds(window_start[None], None, None)
    assert call.cu_seqlens_k is not None
    # Offsets past the pool are a caller's mistake; no kernel may read past it for that.
    pool_offsets = call.cu_seqlens_k.clamp(0, call.sparse_kv.shape[2])
    pool_start = pool_offsets[document]
    pool_end = torch.where(spare, pool_start, pool_offsets[document + 1])
    if call.kind is Kind.DENSE:
        assert call.compress_ratio is not None
        # Counted from the document's true beginning, which may lie before row 0.
        complete = (position - start + 1) // call.compress_ratio
        complete = complete.clamp(0, call.sparse_kv.shape[2])
        pool_end = torch.minimum(pool_end, pool_start + complete)
    return TokenBounds(window_start[None], pool_start[None], pool_end[None])
