"""Eager PyTorch backend: the operation on any device, in bounded memory, meant to be read."""

from .plugin import EagerBackend

__all__ = ["EagerBackend", "backend"]

backend = EagerBackend()
