"""Triton kernels of compressed sparse attention, forward and backward, SM80 to SM120."""

from .backend import TritonBackend

backend = TritonBackend()

__all__ = ["TritonBackend", "backend", "load_tiles"]


def load_tiles(path: str) -> int:
    """Put tiles that ``python -m csa_backend_triton.tuner`` wrote in force; how many.

    Raises:
        OSError, ValueError: the file cannot be read, or is not such a file.
    """
    from .tuner import load_tiles as load

    return load(path)
