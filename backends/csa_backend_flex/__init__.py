"""torch FlexAttention for the kinds whose mask no index decides: window and dense-compressed."""

from __future__ import annotations

from .backend import FlexBackend

backend = FlexBackend()

__all__ = ["FlexBackend", "backend"]
