"""Triton kernels of compressed sparse attention, forward and backward, SM80 to SM120."""

from .backend import TritonBackend

backend = TritonBackend()

__all__ = ["TritonBackend", "backend"]
