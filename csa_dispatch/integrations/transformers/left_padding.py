"""Batches padded on the left: every row is computed by itself, from its first token on.

A row's entries must pool its own tokens and no padding, so rows do not share block boundaries: a
layer runs once a row, and each row has a cache layer of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache as once
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .entries import Rotation


class RowCache:
    """One row's cache layer, as an attention layer asks a cache for it."""

    def __init__(self, layer: Any, number: int) -> None:
        self.layers = {number: layer}

    def get_seq_length(self, number: int) -> int:
        return self.layers[number].get_seq_length()

    def update(self, keys: Tensor, values: Tensor, number: int, **_: Any) -> tuple[Tensor, Tensor]:
        return self.layers[number].update(keys, values)


@once
def padded_layer_class() -> type:
    """The class of a cache layer that holds one of V4's own for each row of the batch."""
    base = import_module("transformers.cache_utils").CacheLayerMixin

    class PaddedLayer(base):
        """Rows of the batch with cache layers of their own, and the tokens seen, padding included.

        Attributes:
            rows: one cache layer a row.
            seen: tokens of every row, its padding included.
            padding: tokens of padding each row began with.
        """

        def __init__(self, layer: Any, rows: int) -> None:
            super().__init__()
            self.empty, self.seen, self.padding = layer, 0, [0] * rows
            self.rows = [copy.deepcopy(layer) for _ in range(rows)]

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            raise NotImplementedError("rows initialise their own layers")

        def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            raise NotImplementedError("rows update their own layers; enable the model again")

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.seen + query_length, 0

        def get_seq_length(self) -> int:
            return self.seen

        def get_max_length(self) -> int:
            return -1

        def reset(self) -> None:
            self.__init__(self.empty, len(self.rows))

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self._choose(beam_idx.tolist())

        def batch_repeat_interleave(self, repeats: int) -> None:
            self._choose([row for row in range(len(self.rows)) for _ in range(repeats)])

        def batch_select_indices(self, indices: Tensor) -> None:
            self._choose(torch.arange(len(self.rows))[indices.cpu()].tolist())

        def _choose(self, rows: list[int]) -> None:
            self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
            self.padding = [self.padding[row] for row in rows]

    return PaddedLayer


def is_padded(cache: Any) -> bool:
    """Whether a cache holds rows of different beginnings."""
    return cache is not None and isinstance(next(iter(cache.layers), None), padded_layer_class())


def pad_cache(cache: Any, rows: int) -> None:
    """Give every row of an empty cache layers of its own."""
    cache.layers[:] = [padded_layer_class()(layer, rows) for layer in cache.layers]


def run_rows(
    forward: Callable[..., tuple[Tensor, None]],
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: dict[str, Rotation],
    position_ids: Tensor,
    cache: Any,
    padding: Sequence[int],
) -> Tensor:
    """An attention layer's output ``[B, T, hidden_size]``; 0 for padding.

    Args:
        forward: the layer's, for a batch without padding.
        padding: tokens of padding at the beginning of each row of this call.
    """
    tokens, outputs = hidden_states.shape[1], []
    own = None if cache is None else cache.layers[layer.layer_idx]
    for row, first in enumerate(padding):
        part = (slice(row, row + 1), slice(first, None))
        if first == tokens:
            outputs.append(torch.zeros_like(hidden_states[:1]))
            continue
        rotations = {
            kind: (cos[part], sin[part]) for kind, (cos, sin) in position_embeddings.items()
        }
        held = None if own is None else RowCache(own.rows[row], layer.layer_idx)
        output, _ = forward(layer, hidden_states[part], rotations, position_ids[part], None, held)
        outputs.append(pad(output, (0, 0, first, 0)))
    if own is not None:
        own.seen += tokens
    return torch.cat(outputs)
