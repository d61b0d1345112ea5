"""The lightning indexer by cuDNN: its score kernel, then its top-k, for some tokens at a time.

cuDNN takes packed documents, each with the number of tokens that came before its first one here.
So a block of tokens is a packed call in which documents begun in earlier blocks are continued, and
a batch is a packed call of equal documents. Which scores a token may use is told to the top-k, by
their number: columns of a document's scores count from its first entry, as picks do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import (
    Between,
    IndexerCall,
    IndexerCapabilities,
    IndexerSpec,
    OneOf,
    Operation,
    Reason,
    visible_entries,
)
from csa_dispatch.call_spec import stride_class

from .entry_points import indexer_entry_points
from .forward import device_of, rows_by_token

WORKSPACE_BYTES = 256 * 2**20
"""Most that the scores of a block of tokens and the top-k's scratch take; 128 tokens' may more."""

PAIR_BYTES = 12
"""Of a token and an entry: a score, and two words of the top-k's scratch."""

TOKENS = 128
"""Blocks are multiples of this many tokens."""

COLUMNS = 256
"""Rows of scores are multiples of this: the package keeps a plan for each length it has seen."""

HOPPER_HEADS = (16, 32, 64)


def heads_on_hopper(spec: IndexerSpec) -> Reason | None:
    """On SM90 the indexer has 16, 32 or 64 heads."""
    if spec.capability != 90 or spec.heads in HOPPER_HEADS:
        return None
    return Reason("heads", str(spec.heads), "16, 32 or 64 on SM90", "use triton")


class CudnnIndexer(Operation):
    """Picks in ascending order, the lowest of equal scores, where 0.0 comes before -0.0."""

    evidence = "SM90: verified; SM100, SM103: lowered"
    forward_capabilities = IndexerCapabilities(
        dtype=OneOf(("bfloat16",), others=("float16", "float32", "float64")),
        device_type=OneOf(("cuda",), others=("cpu", "meta")),
        capability=OneOf((90, 100, 103), others=(80, 120)),
        heads=OneOf((4, 8, 16, 32, 64), others=(1, 128)),
        head_dim=OneOf((128,), others=(64, 256)),
        topk=Between(1, 2048),
        predicates=(heads_on_hopper,),
        remedies=(
            ("dtype", "cast to bfloat16, or use eager, or triton below float64"),
            ("device_type", "use eager"),
            ("capability", "use triton, or eager below 80"),
            ("heads", "use triton"),
            ("head_dim", "use triton up to 128, or eager"),
            ("topk", "use triton or eager"),
        ),
    )

    def forward(self, call: IndexerCall) -> Tensor:
        batch, _, tokens, _ = call.index_query.shape
        start, end = visible_entries(call)
        seen = (end - start).clamp_(min=0)
        picks = seen.new_empty(batch, tokens, call.topk)
        step = _tokens_of_block(call)
        keys = _aligned(call.index_keys.detach().flatten(0, 1).contiguous())
        for first in range(0, tokens, step):
            rows = slice(first, min(first + step, tokens))
            longest = call.index_keys.shape[1]
            if call.cu_seqlens is None:
                longest = min(longest, (call.past + rows.stop) // call.compress_ratio)
            if longest <= call.topk:
                every = torch.arange(call.topk, dtype=torch.int32, device=picks.device)
                picks[:, rows] = torch.where(every < seen[:, rows, None], every, -1)
            else:
                found = _picks(call, keys, rows, longest, seen[:, rows])
                picks[:, rows] = found.unflatten(0, (batch, -1))
        return picks

    def notes(self, spec: IndexerSpec) -> tuple[str, ...]:
        del spec
        return ("copies the query unless it lies as [B, T, H, D], a block of tokens at a time",)


def _tokens_of_block(call: IndexerCall) -> int:
    width = _padded(call.index_keys.shape[1])
    tokens = WORKSPACE_BYTES // (PAIR_BYTES * width * call.index_query.shape[0])
    return max(1, tokens // TOKENS) * TOKENS


def _padded(columns: int) -> int:
    return max(1, -(-columns // COLUMNS)) * COLUMNS


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous rows that start on 16 bytes."""
    return tensor if stride_class(tensor) == "aligned" else tensor.clone()


class _Documents(NamedTuple):
    """A block of tokens as cuDNN's packed documents; each int32.

    Attributes:
        tokens, entries: offsets ``[N + 1]`` along the block's tokens and the keys.
        before: ``[N]``, tokens of each document before its first one in the block.
    """

    tokens: Tensor
    entries: Tensor
    before: Tensor


def _documents(call: IndexerCall, rows: slice) -> _Documents:
    batch, pool = call.index_keys.shape[:2]
    count = rows.stop - rows.start
    if call.cu_seqlens is not None and call.cu_seqlens_k is not None:
        begun = rows.start - call.cu_seqlens
        entries = call.cu_seqlens_k.clamp(max=pool)
        return _Documents((-begun).clamp_(0, count), entries, begun[:-1].clamp(min=0))
    each = torch.arange(batch + 1, dtype=torch.int32, device=call.index_query.device)
    before = torch.full_like(each[:-1], call.past + rows.start)
    return _Documents(each * count, each * pool, before)


def _picks(call: IndexerCall, keys: Tensor, rows: slice, longest: int, seen: Tensor) -> Tensor:
    """int32 ``[B * rows, topk]``."""
    query = rows_by_token(call.index_query[:, :, rows])
    weights = call.weights.detach()[:, rows].flatten(0, 1).contiguous()
    documents = _documents(call, rows)
    points = indexer_entry_points()
    with device_of(query):
        scores = points.scores(
            query,
            keys[:, None],
            _aligned(weights),
            ratio=call.compress_ratio,
            cu_seqlens_q=documents.tokens,
            cu_seqlens_k=documents.entries,
            max_seqlen_q=rows.stop - rows.start,
            max_seqlen_k=_padded(longest),
            q_causal_offsets=documents.before,
        )["scores"]
        found = points.top_k(
            scores, seen.flatten(), call.topk, return_val=False, deterministic=True
        )
    return found["indices"]
