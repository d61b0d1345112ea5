"""``attn_gym.sparse.lightning_indexer``: the reference on a CPU, its Triton kernel on CUDA.

Its scale is fixed, which changes no pick. It has no tokens before the first, wants as many
entries as the tokens make (more are cut off here) and, fused, weights of the query's dtype. The
reference forms scores of every head at once; it gets fp32 copies, so that weights may differ
in dtype.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib import metadata, util
from typing import Any

import torch
from torch import Tensor

from csa_dispatch import (
    FALSE,
    IndexerCall,
    IndexerCapabilities,
    IndexerSpec,
    OneOf,
    Operation,
    Reason,
)

SCORE_BYTES_LIMIT = 2 * 2**30
"""The reference forms the scores of every head at once; beyond this it is no use."""


@lru_cache(maxsize=1)
def _parameters() -> frozenset[str]:
    """Arguments of the installed indexer; none when there is no indexer."""
    if util.find_spec("attn_gym") is None:
        return frozenset()
    try:
        from attn_gym.sparse.indexer import lightning_indexer
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(lightning_indexer).parameters)


def packed_and_compressed(spec: IndexerSpec) -> Reason | None:
    """An attn-gym whose lightning_indexer takes compress_ratio and cu_seqlens."""
    del spec
    wanted = {"compress_ratio", "cu_seqlens", "cu_seqlens_k", "impl", "kernel_options"}
    if util.find_spec("attn_gym") is None or wanted <= _parameters():
        return None  # not installed is said elsewhere
    needed = "one whose lightning_indexer takes compress_ratio and cu_seqlens"
    actual = f"attn-gym {metadata.version('attn-gym')}"
    return Reason("packed_and_compressed", actual, needed, "pip install 'attn-gym>=0.0.17'")


def entries_of_the_tokens(spec: IndexerSpec) -> Reason | None:
    """Unpacked pools hold at least T // compress_ratio entries."""
    made = spec.tokens // spec.compress_ratio
    if spec.documents != "none" or spec.pool >= made:
        return None
    return Reason("pool", str(spec.pool), f"at least {made}", "Use eager or triton.")


def scores_fit(spec: IndexerSpec) -> Reason | None:
    """On a CPU the scores of all heads (B, H, T, S): at most 2 GiB."""
    width = 8 if spec.dtype == "float64" else 4
    need = spec.batch * spec.heads * spec.tokens * spec.pool * width
    if spec.device_type != "cpu" or need <= SCORE_BYTES_LIMIT:
        return None
    actual = f"{need / 2**30:.1f} GiB of scores"
    return Reason("scores_fit", actual, "at most 2 GiB", "Use eager or triton.")


def fused_kernel(spec: IndexerSpec) -> Reason | None:
    """On CUDA SM90 or newer, bf16 or fp16, weights alike, aligned, H, D to 256, T to 2**20."""
    if spec.device_type != "cuda":
        return None
    bounds: tuple[tuple[str, bool, str], ...] = (
        ("capability", spec.capability is None or spec.capability >= 90, "at least 90"),
        ("dtype", spec.dtype in ("bfloat16", "float16"), "bfloat16 or float16"),
        ("weights_dtype", spec.weights_dtype == spec.dtype, f"{spec.dtype}, as the query"),
        ("strides", spec.strides == "aligned", "aligned"),
        ("heads", spec.heads <= 256, "at most 256"),
        ("head_dim", spec.head_dim <= 256 and spec.head_dim % 8 == 0, "a multiple of 8 to 256"),
        ("tokens", spec.tokens <= 2**20, "at most 1048576"),
    )
    for field, fits, needed in bounds:
        if not fits:
            # Triton's indexer has bounds of its own, which the value may not meet either.
            remedy = {
                "capability": "Use triton, or eager below 80.",
                "dtype": "Use eager, or triton for float32.",
                "head_dim": "Use triton up to 128, or eager.",
            }.get(field, "Use triton or eager.")
            return Reason(field, str(getattr(spec, field)), needed, remedy)
    return None


class AttentionGymIndexer(Operation):
    """Picks by Attention Gym; in float16 and bfloat16 as everywhere else accumulated in fp32."""

    evidence = "CPU; SM90: verified; else contract-tested"
    forward_capabilities = IndexerCapabilities(
        device_type=OneOf(("cpu", "cuda"), others=("meta",)),
        dtype=OneOf(("float64", "float32", "bfloat16", "float16")),
        with_past=FALSE,
        predicates=(packed_and_compressed, entries_of_the_tokens, scores_fit, fused_kernel),
        remedies=(
            ("with_past", "Use eager or triton to decode."),
            ("device_type", "Use eager."),
        ),
    )

    def forward(self, call: IndexerCall) -> Tensor:
        from attn_gym.sparse.indexer import lightning_indexer

        query, keys, weights = call.index_query.transpose(1, 2), call.index_keys, call.weights
        offsets, offsets_k = call.cu_seqlens, call.cu_seqlens_k
        if offsets is None or offsets_k is None:
            keys = keys[:, : query.shape[1] // call.compress_ratio]
        else:
            offsets = offsets.contiguous()
            offsets_k = offsets_k.contiguous().clamp(max=keys.shape[1])
        options: dict[str, Any] = {"kernel_options": {"backend": "triton"}}
        if not query.is_cuda:
            dtype = torch.promote_types(query.dtype, torch.float32)
            query, keys, weights = query.to(dtype), keys.to(dtype), weights.to(dtype)
            options = {"impl": "reference"}
        return lightning_indexer(
            query,
            keys,
            weights,
            call.topk,
            causal=True,
            compress_ratio=call.compress_ratio,
            cu_seqlens=offsets,
            cu_seqlens_k=offsets_k,
            **options,
        )

    def notes(self, spec: IndexerSpec) -> tuple[str, ...]:
        if spec.device_type == "cpu":
            return ("the reference forms scores of every head at once",)
        return ()
