"""Attention Gym as a backend: its eager reference implementation of ``gather_attn``."""

from __future__ import annotations

from .adapter import AttentionGymBackend

backend = AttentionGymBackend()

__all__ = ["AttentionGymBackend", "backend"]
