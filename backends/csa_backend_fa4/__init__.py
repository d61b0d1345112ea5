"""FlashAttention-4's CuTe sparse-MLA kernels (flash-attn-4), forward and backward."""

from __future__ import annotations

from .backend import FA4Backend

backend = FA4Backend()

__all__ = ["FA4Backend", "backend"]
