"""Attention Gym as a backend: ``gather_attn``'s reference on a CPU, its fused kernels on CUDA."""

from __future__ import annotations

from .adapter import AttentionGymBackend

backend = AttentionGymBackend()

__all__ = ["AttentionGymBackend", "backend"]
