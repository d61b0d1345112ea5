"""What decoding keeps of one layer: window ring, partial block, entries. No pages."""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import attention
from ..functional import CompressorState
from ..functional.past import attention_with_past, complete_entries, window_rows
from ..validation import fail
from ..wording import a_kind, quoted, told
from .checks import check_device
from .config import CSAConfig


class Growing:
    """Rows ``[B, n, D]`` that others are appended to; memory doubles when it is full.

    Args:
        head: rows kept free before the first, for the owner's use.
    """

    def __init__(self, batch: int, size: int, like: Tensor, head: int = 0) -> None:
        self._memory = like.new_zeros(batch, head + 64, size)
        self._head, self._end = head, head

    @property
    def rows(self) -> Tensor:
        """``[B, n, D]``, a view."""
        return self._memory[:, self._head : self._end]

    @property
    def all_rows(self) -> Tensor:
        """``[B, head + n, D]``, a view."""
        return self._memory[:, : self._end]

    def append(self, rows: Tensor) -> None:
        end = self._end + rows.shape[1]
        if end > self._memory.shape[1]:
            memory = self._memory.new_zeros(rows.shape[0], 2 * end, rows.shape[2])
            memory[:, : self._end] = self.all_rows
            self._memory = memory
        self._memory[:, self._end : end] = rows
        self._end = end


class LayerCache:
    """The tokens that one layer has seen, for ``CompressedSparseAttention(..., cache=...)``.

    The last ``2 * sliding_window`` KV rows lie in a ring, in front of the entries in the same
    memory: one token, or a few, gather window and picks from it without a copy. Longer runs of
    tokens go through ``attention_with_past``.

    Args:
        config: the layer's.
        batch: rows of the batch; all see equally many tokens.
        device, dtype: of the layer's hidden states.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.

    Attributes:
        past: tokens seen.
        entries, index_keys: compressed entries so far, and the indexer's keys.
        state, index_state: partial blocks of the compressor and the indexer.
    """

    def __init__(
        self,
        config: CSAConfig,
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(config, batch, dtype)
        check_device(device)
        like = torch.empty(0, device=device, dtype=dtype)
        self.config, self.past = config, 0
        self._ring = 2 * config.sliding_window
        self.entries = Growing(batch, config.head_dim, like, head=self._ring)
        self.index_keys = Growing(batch, config.index_head_dim, like)
        self.state: CompressorState | None = None
        self.index_state: CompressorState | None = None

    def check(self, config: CSAConfig, local_kv: Tensor) -> None:
        """Raise ValueError unless the cache is of this layer and can hold ``[B, 1, T, D]``."""
        if config != self.config:
            raise ValueError(
                "cache is of another layer's config; it must be LayerCache(layer.config, ...)."
            )
        held = self.entries.all_rows
        if held.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                "cache was made in torch.inference_mode(); it must be used there. Make and use it "
                "in torch.no_grad() to leave that mode between tokens."
            )
        for name, found, required in (
            ("batch", held.shape[0], local_kv.shape[0]),
            ("dtype", held.dtype, local_kv.dtype),
            ("device", held.device, local_kv.device),
        ):
            if found != required:
                raise ValueError(
                    f"cache is of {name} {found}; it must be of {required}, as the layer's KV "
                    f"rows are. Make it with {name}={required}."
                )

    def attend(
        self, query: Tensor, local_kv: Tensor, picks: Tensor | None, sinks: Tensor
    ) -> Tensor:
        """Attention of the next tokens, whose entries were appended before: ``[B, H, T, D]``.

        Args:
            query: ``[B, H, T, D]``.
            local_kv: ``[B, 1, T, D]``.
            picks: ``[B, T, K]`` entries they selected; None for every complete one.
            sinks: ``[H]``.
        """
        config, past, tokens = self.config, self.past, query.shape[2]
        window, scale = config.sliding_window, config.head_dim**-0.5
        self.past += tokens
        if past == 0 or tokens + window - 1 > self._ring:
            before = self._slots(range(past - min(past, window - 1), past), query.device)
            rows = torch.cat((self.entries.all_rows[:, before][:, None], local_kv), dim=2)
            self._write(local_kv, past)
            dense = config.has_compressor and picks is None
            return attention_with_past(
                query,
                rows,
                self.entries.rows[:, None] if config.has_compressor else None,
                picks,
                sinks,
                past=past,
                sliding_window_size=window,
                compress_ratio=config.compress_ratio if dense else None,
                scale=scale,
            )
        self._write(local_kv, past)
        if config.has_compressor and picks is None:
            entries = self.entries.rows.shape[1]
            picks = complete_entries(query, entries, past, config.compress_ratio)
        indices = window_rows(query, past, window)
        indices = torch.where(indices < 0, -1, indices % self._ring)
        if picks is not None:
            picks = torch.where(picks < 0, -1, picks + self._ring)
            indices = torch.cat((indices, picks), dim=-1)
        return attention(
            query,
            local_kv,
            self.entries.all_rows[:, None],
            indices,
            sinks,
            sliding_window_size=0,
            scale=scale,
        )

    def _write(self, local_kv: Tensor, past: int) -> None:
        """Put the last rows of ``[B, 1, T, D]`` into the ring."""
        end = past + local_kv.shape[2]
        kept = range(max(past, end - self._ring), end)
        slots = self._slots(kept, local_kv.device)
        self.entries.all_rows[:, slots] = local_kv[:, 0, kept.start - past :]

    def _slots(self, tokens: range, device: torch.device) -> Tensor:
        """Ring slots of these tokens."""
        return torch.arange(tokens.start, tokens.stop, device=device) % self._ring


def _check(config: CSAConfig, batch: int, dtype: torch.dtype | None) -> None:
    if not isinstance(config, CSAConfig):
        actual, required = a_kind(config), "the layer's CSAConfig"
        fail("config", actual, required, "Pass layer.config.", TypeError)
    if isinstance(batch, bool) or not isinstance(batch, int):
        actual = told(batch)
        fail("batch", actual, "an int", "Pass the number of sequences.", TypeError)
    if batch < 1:
        fail("batch", batch, "1 or more", "Pass the number of sequences.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        required = "a floating torch.dtype or None"
        fail("dtype", quoted(dtype), required, "Pass that of the layer's weights.", TypeError)
