"""Eager PyTorch backend: the operation on any device, in bounded memory, meant to be read."""

from .backend import EagerBackend

__all__ = ["EagerBackend", "backend"]

backend = EagerBackend()
