"""V4's rotary embedding: interleaved pairs in the trailing channels, in fp32, cast once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import CSAConfig, Yarn


def rope_frequencies(config: CSAConfig, device: torch.device | None = None) -> Tensor:
    """Angles per position of a layer's channel pairs: fp32 ``[qk_rope_head_dim / 2]``.

    ``theta ** (-2i / R)``, stretched by YaRN (arXiv 2309.00071, without its attention factor)
    in layers with a compressor.
    """
    size = config.qk_rope_head_dim
    pairs = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / config.theta**pairs
    if config.has_compressor and config.yarn is not None:
        kept = _kept(config.yarn, config.theta, size, device)
        frequencies = frequencies * kept + frequencies / config.yarn.factor * (1 - kept)
    return frequencies


def _kept(yarn: Yarn, theta: float, size: int, device: torch.device | None) -> Tensor:
    """Share of each frequency that is kept rather than divided: 1 for the fast ones."""

    def pair_of(rotations: float) -> float:
        # The pair that turns so many times within the context of pretraining.
        length = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), size - 1)
    pair = torch.arange(size // 2, dtype=torch.float32, device=device)
    return 1 - ((pair - low) / max(high - low, 0.001)).clamp(0, 1)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the trailing channels of ``x`` ``[B, T, D]`` or ``[B, T, H, D]``.

    Args:
        positions: int ``[T]``.
        frequencies: ``[R / 2]`` of ``rope_frequencies``; the last R channels are rotated.
        back: the other way round.

    Returns:
        A tensor like ``x``.
    """
    angle = positions[:, None].to(frequencies.dtype) * (-frequencies if back else frequencies)
    if x.ndim == 4:
        angle = angle[:, None]
    size = 2 * frequencies.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    even, odd = x[..., -size:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-size], turned.to(x.dtype)), dim=-1)
