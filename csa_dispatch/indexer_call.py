"""One lightning-indexer call: as a backend sees it, as routing sees it, and what claims bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call, token_bounds
from .call_spec import deterministic_mode, device_capability, stride_class
from .capabilities import ANY, Allowed, Claims


class IndexerCall(NamedTuple):
    """The tensors and scalars of one validated call of ``lightning_indexer``.

    Tensors have arbitrary strides. Backends only read them.

    Attributes:
        index_query: ``[B, H, T, D]`` fp64, fp32, bf16 or fp16.
        index_keys: ``[B, S, D]``, the query's dtype; S may be 0.
        weights: ``[B, T, H]`` in the query's dtype or fp32.
        topk: entries to pick for each token, 1 or more; may exceed S.
        compress_ratio: tokens of an entry.
        past: tokens before the first of these; 0 when packed.
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` document offsets along T and S, or None.
    """

    index_query: Tensor
    index_keys: Tensor
    weights: Tensor
    topk: int
    compress_ratio: int
    past: int
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None


class IndexerSpec(NamedTuple):
    """Frozen, hashable, picklable description of a call of ``lightning_indexer``.

    Attributes:
        dtype, weights_dtype: of index_query and of weights.
        device_type, capability, strides, deterministic, tracing: as in ``CallSpec``.
        batch, heads, tokens, head_dim, pool: B, H, T, D, S.
        documents: ``"none"`` or ``"cu_seqlens"``.
        with_past: whether tokens precede the first query.
    """

    dtype: str = "bfloat16"
    weights_dtype: str = "float32"
    device_type: str = "cpu"
    capability: int | None = None
    batch: int = 1
    heads: int = 64
    tokens: int = 4096
    head_dim: int = 128
    pool: int = 1024
    topk: int = 512
    compress_ratio: int = 4
    documents: str = "none"
    with_past: bool = False
    strides: str = "aligned"
    deterministic: bool = False
    tracing: bool = False

    operation = "lightning_indexer"

    @property
    def differentiable(self) -> bool:
        """Never: picks have no gradient."""
        return False


@dataclass(frozen=True)
class IndexerCapabilities(Claims):
    """Claims about ``lightning_indexer``: each field bounds the IndexerSpec field of its name."""

    dtype: Allowed = ANY
    weights_dtype: Allowed = ANY
    device_type: Allowed = ANY
    capability: Allowed = ANY
    batch: Allowed = ANY
    heads: Allowed = ANY
    tokens: Allowed = ANY
    head_dim: Allowed = ANY
    pool: Allowed = ANY
    topk: Allowed = ANY
    compress_ratio: Allowed = ANY
    documents: Allowed = ANY
    with_past: Allowed = ANY
    strides: Allowed = ANY
    deterministic: Allowed = ANY
    tracing: Allowed = ANY


def indexer_spec_of(call: IndexerCall, *, tracing: bool = False) -> IndexerSpec:
    """The IndexerSpec of a validated call, from its metadata alone."""
    query = call.index_query
    batch, heads, tokens, head_dim = query.shape
    return IndexerSpec(
        dtype=str(query.dtype).removeprefix("torch."),
        weights_dtype=str(call.weights.dtype).removeprefix("torch."),
        device_type=query.device.type,
        capability=device_capability(query.device),
        batch=batch,
        heads=heads,
        tokens=tokens,
        head_dim=head_dim,
        pool=call.index_keys.shape[1],
        topk=call.topk,
        compress_ratio=call.compress_ratio,
        documents="none" if call.cu_seqlens is None else "cu_seqlens",
        with_past=call.past > 0,
        strides=stride_class(query, call.index_keys),
        deterministic=deterministic_mode(),
        tracing=tracing,
    )


def visible_entries(call: IndexerCall) -> tuple[Tensor, Tensor]:
    """First and one past the last row of ``index_keys`` that each token sees, int32 ``[B, T]``.

    Computed on device without a sync. Rows past the last document see nothing.
    """
    query, keys = call.index_query, call.index_keys
    if call.cu_seqlens is not None:
        # What a dense-compressed attention call sees.
        bounds = token_bounds(
            Call(
                query,
                query,
                keys[:, None],
                None,
                None,
                call.cu_seqlens,
                call.cu_seqlens_k,
                None,
                0,
                call.compress_ratio,
                1.0,
            )
        )
        assert bounds is not None
        assert bounds.pool_start is not None
        assert bounds.pool_end is not None
        return bounds.pool_start.to(torch.int32), bounds.pool_end.to(torch.int32)
    batch, tokens = query.shape[0], query.shape[2]
    covered = torch.arange(call.past + 1, call.past + tokens + 1, device=query.device)
    end = (covered // call.compress_ratio).clamp(max=keys.shape[1]).to(torch.int32)
    end = end.expand(batch, tokens)
    return torch.zeros_like(end), end
