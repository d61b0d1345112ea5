"""P and dS kept between kernels: where they lie and how many tokens' worth fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .operands import Operands

WORKSPACE_BYTES = 480 << 20
"""Most that a pool's fp32 sums and the buffers of one chunk of tokens take, beside delta;
where delta is large it leaves them less (``workspace``)."""

CHUNK_BYTES = 352 << 20
"""Most that the buffers of one chunk of tokens take; larger ones gain nothing."""

WINDOW_KEYS = 64
"""Key rows of one program of ``window_rows_kernel``."""


class Stored(NamedTuple):
    """P and dS of the tokens in work.

    Attributes:
        p, ds: ``[ring, places, padded heads]``; token ``n = b * T + t`` lies at ``n % ring``.
            The first W places, if ``window``, are the window's keys ``t - W + 1 .. t``; the
            K slots follow, if ``used_end`` is there. bf16 for bf16 inputs, else fp32.
        used_end: int32 ``[ring]``, one past the token's last used slot; None without slots.
        window: whether the window's scores are kept.
        chunk: tokens worked on at once.
    """

    p: Tensor
    ds: Tensor
    used_end: Tensor | None
    window: bool
    chunk: int

    @property
    def ring(self) -> int:
        return self.p.shape[0]

    @property
    def places(self) -> int:
        return self.p.shape[1]

    @property
    def padded_heads(self) -> int:
        return self.p.shape[2]


def score_dtype(operands: Operands) -> torch.dtype:
    """fp16's range does not hold dS, so only bf16 is kept as it is."""
    is_bf16 = operands.call.query.dtype == torch.bfloat16
    return torch.bfloat16 if is_bf16 else torch.float32


def padded_heads(operands: Operands) -> int:
    """Heads, rounded up to whole vectors."""
    return -(-operands.call.query.shape[1] // 16) * 16


def score_bytes(operands: Operands, places: int) -> int:
    """Of a token's P and dS."""
    return 2 * places * padded_heads(operands) * score_dtype(operands).itemsize


def kept_tokens(operands: Operands) -> int:
    """Tokens whose scores the window's gradient may still need, beside the chunk's."""
    return operands.window + WINDOW_KEYS


def allocate(
    operands: Operands,
    window: bool,
    slots: bool,
    deterministic: bool,
    workspace: int = CHUNK_BYTES,
) -> Stored:
    """Buffers for chunks of equal length that fit ``workspace`` bytes if one token does.

    When ``deterministic``, so must a chunk's rows before they are summed (``pool_rows``). The
    window's scores are kept until the last token that reads a block of keys is done.
    """
    query = operands.call.query
    batch, _, tokens, head_dim = query.shape
    dtype = score_dtype(operands)
    places = (operands.window if window else 0) + (operands.slots if slots else 0)
    kept_bytes = score_bytes(operands, places)
    token_bytes = kept_bytes
    row_bytes = operands.kv_heads * head_dim * dtype.itemsize
    if slots and deterministic:
        token_bytes += operands.slots * row_bytes
    if window and operands.kv_heads > 1:
        token_bytes += row_bytes  # ``window_rows`` copies a chunk's gradient
    kept = kept_tokens(operands) if window else 0
    room = max((workspace - kept * kept_bytes) // token_bytes, 1)
    chunks = max(-(-batch * tokens // room), 1)
    chunk = max(-(-batch * tokens // chunks), 1)
    ring = min(chunk + kept, batch * tokens)
    p = query.new_empty((ring, places, padded_heads(operands)), dtype=dtype)
    used_end = query.new_empty(ring, dtype=torch.int32) if slots else None
    return Stored(p, torch.empty_like(p), used_end, window, chunk)
