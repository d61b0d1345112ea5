"""The compressor: every ``r`` tokens of hidden states become one entry."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import CompressorState, compress_kv, compress_kv_step
from .config import CSAConfig
from .norm import RMSNorm
from .rope import rotate
from .rows import Tokens, entry_positions


class Compressor(nn.Module):
    """Linear maps to values and gates, ``compress_kv``, norm and rotary embedding.

    Args:
        config: the layer's sizes.
        head_dim: channels of an entry.
        device, dtype: of the linear maps; position biases and norm are fp32.
    """

    def __init__(
        self,
        config: CSAConfig,
        head_dim: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        channels = head_dim * (2 if config.overlapping else 1)
        made = {"bias": False, "device": device, "dtype": dtype}
        self.kv_proj = nn.Linear(config.hidden_size, channels, **made)
        self.gate_proj = nn.Linear(config.hidden_size, channels, **made)
        self.position_bias = nn.Parameter(
            torch.zeros(config.compress_ratio, channels, device=device, dtype=torch.float32)
        )
        self.kv_norm = RMSNorm(head_dim, config.rms_norm_eps, device)

    def forward(
        self, tokens: Tokens, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Entries ``[B, T // r, D]`` of whole sequences, and ``cu_seqlens_k`` when packed."""
        config = self.config
        values, gates = self._project(tokens)
        entries, cu_seqlens_k = compress_kv(
            values,
            gates,
            self.position_bias,
            config.compress_ratio,
            overlapping=config.overlapping,
            cu_seqlens=cu_seqlens,
        )
        positions = entry_positions(
            entries.shape[1], config.compress_ratio, cu_seqlens_k, entries.device
        )
        return rotate(self.kv_norm(entries), positions, tokens.frequencies), cu_seqlens_k

    def step(
        self, tokens: Tokens, state: CompressorState | None, past: int
    ) -> tuple[Tensor, CompressorState]:
        """Entries ``[B, n, D]`` that the next tokens complete, and the state after them.

        Args:
            tokens: the next tokens.
            state: what the step before returned; None at the start.
            past: tokens before these.
        """
        config = self.config
        entries, state = compress_kv_step(
            *self._project(tokens),
            state,
            self.position_bias,
            config.compress_ratio,
            overlapping=config.overlapping,
        )
        first, ratio = past // config.compress_ratio, config.compress_ratio
        positions = torch.arange(first, first + entries.shape[1], device=entries.device) * ratio
        return rotate(self.kv_norm(entries), positions, tokens.frequencies), state

    def _project(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Values and gates, ``[B, T, C]``."""
        split = tokens.rows.split
        return split(self.kv_proj(tokens.hidden)), split(self.gate_proj(tokens.hidden))
