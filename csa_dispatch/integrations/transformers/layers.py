"""The forward of transformers' V4 attention layer with ``attention()`` in its middle.

Projections, norms, rotary embeddings and cache layers are the layer's own. What differs: there is
no mask, the compressor's entries stay a pool, and the indexer's picks stay indices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...api import attention
from ...functional import attention_with_past
from .entries import Rotation, picked_entries, pooled_entries
from .left_padding import run_rows


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: dict[str, Rotation],
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    padding: Sequence[int] | None = None,
    documents: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``DeepseekV4Attention.forward``, but that it returns no attention weights.

    The enabled model gives ``padding``, each row's on the left, and ``documents``, the
    ``cu_seqlens`` of documents packed into one row.

    Raises:
        ValueError: a mask is given, or dropout is on in training.
    """
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is given to an enabled attention layer; it must be None. "
            "Causality, window and picks are the layer's own; call the whole model instead."
        )
    if self.training and self.attention_dropout:
        raise ValueError(
            f"attention_dropout is {self.attention_dropout}; it must be 0 in training, as "
            "attention() has no dropout. Set config.attention_dropout = 0."
        )
    if padding is not None:
        rows = (hidden_states, position_embeddings, position_ids, cache, padding)
        return run_rows(attention_forward, self, *rows), None
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    rotation = position_embeddings[self.rope_layer_type]
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    residual = self.q_a_norm(self.q_a_proj(hidden_states))
    query = self.q_b_norm(self.q_b_proj(residual).view(heads).transpose(1, 2))
    query = rotate(query, *rotation)
    local_kv = self.kv_norm(self.kv_proj(hidden_states)).view(heads).transpose(1, 2)
    local_kv = rotate(local_kv, *rotation)

    past, cache_layer = 0, None
    if cache is not None:
        past, cache_layer = cache.get_seq_length(self.layer_idx), cache.layers[self.layer_idx]
        local_kv = cache.update(local_kv, local_kv, self.layer_idx, kwargs=kwargs)[0]
    entries = picks = ratio = cu_seqlens_k = None
    if self.compressor is not None:
        pool = (rotate, hidden_states, cache_layer, documents)
        entries, cu_seqlens_k = pooled_entries(self.compressor, "compressor", *pool)
        entries = entries[:, None]
        indexer = getattr(self.compressor, "indexer", None)
        if indexer is None:
            ratio = self.compressor.compress_rate
        else:
            with torch.no_grad():  # indices carry no gradient
                keys, _ = pooled_entries(indexer, "indexer", *pool)
                bounds = {"cu_seqlens": documents, "cu_seqlens_k": cu_seqlens_k, "past": past}
                picks = picked_entries(
                    indexer, rotate, rotation, hidden_states, residual, keys, **bounds
                )
    tensors = (query, local_kv, entries, picks, self.sinks)
    scalars = {
        "sliding_window_size": self.sliding_window,
        "compress_ratio": ratio,
        "scale": self.scaling,
    }
    if documents is not None:
        offsets = {"cu_seqlens": documents, "cu_seqlens_k": cu_seqlens_k}
        output = attention(*tensors, **offsets, **scalars)
    else:
        output = attention_with_past(*tensors, past=past, **scalars)
    # Values carry their rotation; turning back by the query's position makes it relative.
    cos, sin = rotation
    output = rotate(output.transpose(1, 2), cos, -sin, unsqueeze_dim=2)
    grouped = output.reshape(*hidden_states.shape[:-1], self.config.o_groups, -1)
    return self.o_b_proj(self.o_a_proj(grouped).flatten(2)), None
