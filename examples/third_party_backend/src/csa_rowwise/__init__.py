"""A csa-dispatch backend that computes one query row after the other."""

from .backend import RowwiseBackend

backend = RowwiseBackend()

__all__ = ["RowwiseBackend", "backend"]
