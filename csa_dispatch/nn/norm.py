"""RMS norm with fp32 weights: computed in fp32 and cast once."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """``rms_norm`` with a weight that stays fp32 whatever the hidden states are."""

    def __init__(self, size: int, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)
