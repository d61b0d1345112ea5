"""BlockMasks made from spans: block by block, never pair by pair, and kept where they recur.

The KV rows are [local_kv, padded to whole blocks; sparse_kv]. A block row's spans reach from the
least ``low`` to the greatest ``high`` of its tokens, and a block that lies in every one of them is
whole. That takes O(tokens + blocks) memory and time, where ``create_block_mask`` asks the mask
about every pair.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from csa_dispatch import Call, plain_dispatch

from .spans import Span, Spans, spans_of

BLOCK = 128
"""Tokens, and KV rows, of a block."""

KEPT = 32
"""Masks kept; a model has a few kinds of layer at a few lengths."""

_masks: OrderedDict[tuple[object, ...], BlockMask] = OrderedDict()
_lock = threading.Lock()


def padded(rows: int) -> int:
    """``rows`` rounded up to whole blocks."""
    return -(-rows // BLOCK) * BLOCK


def block_mask_for(call: Call, spans: Spans) -> BlockMask:
    """The BlockMask of a call, kept by shape and device unless documents decide it."""
    query, pool = call.query, call.sparse_kv
    if call.cu_seqlens is not None or call.doc_ids is not None or not _lasting(query):
        return build_block_mask(spans, _pool_rows(call))
    key = (
        query.device,
        query.shape[2],
        min(call.sliding_window_size, query.shape[2]),
        None if pool is None else (pool.shape[2], call.compress_ratio),
    )
    with _lock:
        found = _masks.get(key)
        if found is None:
            # Batch entries are alike, so one serves any batch size.
            one = spans_of(call._replace(query=query[:1], local_kv=call.local_kv[:1]))
            found = _masks[key] = build_block_mask(one, _pool_rows(call))
            if len(_masks) > KEPT:
                _masks.popitem(last=False)
        _masks.move_to_end(key)
    return found


def _lasting(query: Tensor) -> bool:
    """Whether a tensor may outlive the call, or be an earlier call's.

    Not in operators, since CUDA graphs may hold them: a graph has memory of its own, and reads
    whatever it read once at every replay. Nor in inference mode, whose tensors no backward
    takes. Both exclude autograd.
    """
    autograd = torch._C.DispatchKey.AutogradFunctionality
    if torch._C._dispatch_tls_is_dispatch_key_excluded(autograd):
        return False
    return not (query.is_cuda and torch.cuda.is_current_stream_capturing())


def forget_masks() -> None:
    """Drop every kept mask."""
    with _lock:
        _masks.clear()


def _pool_rows(call: Call) -> int:
    return 0 if call.sparse_kv is None else call.sparse_kv.shape[2]


def build_block_mask(spans: Spans, pool_rows: int) -> BlockMask:
    """A fresh BlockMask of ``spans``; ``[B or 1, 1, T, padded(T) + pool_rows]``."""
    tokens = spans.local.low.shape[1]
    first = padded(tokens)
    touched, whole = _blocks(spans.local, first // BLOCK, tokens)
    if spans.pool is not None and pool_rows:
        more = _blocks(spans.pool, padded(pool_rows) // BLOCK, pool_rows)
        touched, whole = (
            torch.cat(pair, dim=-1) for pair in zip((touched, whole), more, strict=True)
        )
    partial = _ordered(touched & ~whole)
    full = _ordered(whole)
    with plain_dispatch():  # it uses vmap
        return BlockMask.from_kv_blocks(
            *partial,
            *full,
            BLOCK_SIZE=BLOCK,
            mask_mod=_mask_mod(spans, first),
            seq_lengths=(tokens, first + pool_rows),
        )


def _blocks(span: Span, blocks: int, rows: int) -> tuple[Tensor, Tensor]:
    """bool ``[B, token blocks, blocks]`` each: some token sees some of the block; all see all."""
    count = span.low.shape[1]

    def by_block(ends: Tensor, nothing: int) -> Tensor:
        # Tokens past the end see nothing, as in create_block_mask: their blocks are not whole.
        ends = torch.where(span.empty, nothing, ends)
        fill = (0, padded(count) - count)
        return torch.nn.functional.pad(ends, fill, value=nothing).unflatten(-1, (-1, BLOCK))

    lows, highs = by_block(span.low, rows), by_block(span.high, 0)
    low = torch.arange(blocks, device=span.low.device, dtype=torch.int32) * BLOCK
    touched = (lows.amin(-1)[..., None] < low + BLOCK) & (highs.amax(-1)[..., None] > low)
    whole = (lows.amax(-1)[..., None] <= low) & (highs.amin(-1)[..., None] >= low + BLOCK)
    return touched, whole


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each token block how many blocks there are, and which, those first: int32, one head."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _mask_mod(spans: Spans, first: int):
    """The pairs of ``spans``, pool rows counted from ``first``, as FlexAttention asks for them."""
    low, high = spans.local
    if spans.pool is None:
        if low.shape[0] == 1 and high.shape[0] == 1:
            low, high = low[0], high[0]
            return lambda b, h, q, kv: (kv >= low[q]) & (kv < high[q])
        low, high = torch.broadcast_tensors(low, high)
        return lambda b, h, q, kv: (kv >= low[b, q]) & (kv < high[b, q])
    start, end = (bound + first for bound in spans.pool)
    low, high, start, end = torch.broadcast_tensors(low, high, start, end)
    if low.shape[0] == 1:
        low, high, start, end = low[0], high[0], start[0], end[0]
        return lambda b, h, q, kv: (
            ((kv >= low[q]) & (kv < high[q])) | ((kv >= start[q]) & (kv < end[q]))
        )
    return lambda b, h, q, kv: (
        ((kv >= low[b, q]) & (kv < high[b, q])) | ((kv >= start[b, q]) & (kv < end[b, q]))
    )
