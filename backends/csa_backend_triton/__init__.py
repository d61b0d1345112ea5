"""Triton kernels of compressed sparse attention, forward and backward, SM80 to SM120."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .backend import TritonBackend

if TYPE_CHECKING:
    from csa_dispatch.call_spec import CallSpec

backend = TritonBackend()

__all__ = ["TritonBackend", "backend", "load_tiles", "warmup"]


def load_tiles(path: str) -> int:
    """Put tiles that ``python -m csa_backend_triton.tuner`` wrote in force; how many.

    Raises:
        OSError, ValueError: the file cannot be read, or is not such a file.
    """
    from .tuner import load_tiles as load

    return load(path)


def warmup(specs: Iterable[CallSpec], workers: int = 4) -> int:
    """Compile ahead what calls launch, ``workers`` processes at a time; how many kernels.

    The processes import the program's main module anew, so a script calls this under
    ``if __name__ == "__main__":``.

    Args:
        specs: calls; ``capability`` is this GPU's, ``needs_grad`` says whether to compile a
            backward too.
        workers: processes.

    Raises:
        TypeError: ``specs`` is one spec, or holds something else.
        ValueError: a spec without this GPU's capability, or one that describes no call; fewer
            than one worker.
        BackendRefused: a spec that the backend does not claim; its Reasons say why.
        RuntimeError: there is no CUDA device, or a process ended before its work.
    """
    from .compiling import warmup as compile_all

    return compile_all(specs, workers)
