"""Entries and picks of transformers' V4 compressors and indexers, through our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...functional import CompressorState, compress_kv, compress_kv_step, lightning_indexer
from ...nn.rows import entry_positions

Rotate = Callable[..., Tensor]
Rotation = tuple[Tensor, Tensor]


def pooled_entries(
    part: Any,
    name: str,
    rotate: Rotate,
    hidden_states: Tensor,
    cache_layer: Any,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Every entry so far, normalised and rotated, ``[B, S, D]``; ``cu_seqlens_k`` when packed.

    Args:
        part: a compressor, or an indexer for its keys.
        name: what the cache layer calls it, "compressor" or "indexer".
        rotate: transformers' ``apply_rotary_pos_emb``.
        hidden_states: ``[B, T, d_model]``, the new tokens.
        cache_layer: holds the partial block and the entries of earlier tokens, and is brought up
            to date; None when there are none.
        documents: ``cu_seqlens`` of packed documents, without a cache layer; or None.
    """
    values, gates = part.kv_proj(hidden_states), part.gate_proj(hidden_states)
    overlapping = values.shape[-1] != part.head_dim
    bias, ratio, first, cu_seqlens_k = part.position_bias, part.compress_rate, 0, None
    if cache_layer is None:
        entries, cu_seqlens_k = compress_kv(
            values, gates, bias, ratio, overlapping=overlapping, cu_seqlens=documents
        )
    else:
        first = cache_layer.entry_count[name] * ratio
        state = _read_state(cache_layer, name, bias)
        entries, state = compress_kv_step(
            values, gates, state, bias, ratio, overlapping=overlapping
        )
        _write_state(cache_layer, name, bias, state)
    entries = part.kv_norm(entries)
    positions = entry_positions(entries.shape[1], ratio, cu_seqlens_k, entries.device) + first
    rotation = part.rotary_emb(
        entries, position_ids=positions[None], layer_type=part.rope_layer_type
    )
    entries = rotate(entries[:, None], *rotation)[:, 0]
    if cache_layer is not None:
        entries = cache_layer.update_compressor_states(name, entries)
    return entries, cu_seqlens_k


def _read_state(cache_layer: Any, name: str, bias: Tensor) -> CompressorState | None:
    """The cache layer's state in our form. It keeps branch a's gates with their bias added."""
    gates = cache_layer.buffer_gate[name]
    if gates is None:
        return None
    values, previous_gates = getattr(cache_layer, "overlap_kv", {}).get(name), None
    if values is not None:
        with_bias = cache_layer.overlap_gate[name]
        previous_gates = (with_bias - bias[:, : with_bias.shape[-1]]).to(gates.dtype)
    return CompressorState(cache_layer.buffer_kv[name], gates, values, previous_gates)


def _write_state(cache_layer: Any, name: str, bias: Tensor, state: CompressorState) -> None:
    cache_layer.buffer_kv[name], cache_layer.buffer_gate[name] = state.values, state.gates
    if state.previous_values is not None and state.previous_gates is not None:
        channels = state.previous_gates.shape[-1]
        cache_layer.overlap_kv[name] = state.previous_values
        cache_layer.overlap_gate[name] = state.previous_gates + bias[:, :channels]


def picked_entries(
    indexer: Any,
    rotate: Rotate,
    rotation: Rotation,
    hidden_states: Tensor,
    residual: Tensor,
    keys: Tensor,
    **bounds: Any,
) -> Tensor:
    """The ``index_topk`` best entries of each token, int32 ``[B, T, K]``, -1 unused.

    Args:
        rotation: cos and sin at the tokens' positions.
        residual: ``[B, T, q_lora_rank]``, the normalised low-rank query.
        keys: ``[B, S, index_head_dim]``.
        bounds: ``past``, or ``cu_seqlens`` and ``cu_seqlens_k``, of ``lightning_indexer``.
    """
    query = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
    return lightning_indexer(
        rotate(query, *rotation),
        keys,
        weights,
        max(1, min(indexer.index_topk, keys.shape[1])),
        compress_ratio=indexer.compress_rate,
        scale=scorer.softmax_scale,
        **bounds,
    )
