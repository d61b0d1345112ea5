"""How kernels are started: on their tensors' own device, or only compiled.

Every launch goes through ``launch``. Inside ``compile_only`` it compiles instead, for a given
architecture, from the same launch code and from tensors that need not hold data (meta tensors
do): that is how shapes are warmed up and how all architectures are checked without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .interpreter import install, is_interpreted

if is_interpreted():
    install()


@dataclass
class Compilation:
    """A compile-only session.

    Attributes:
        capability: compute capability to choose tiles for, ``major * 10 + minor``.
        kernels: name, constants and compiled kernel of each launch, in order.
    """

    capability: int
    kernels: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)


_compilation: ContextVar[Compilation | None] = ContextVar("csa_triton_compilation", default=None)


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[Compilation]:
    """Compile what is launched inside, for ``capability``, and run none of it."""
    session = Compilation(capability)
    token = _compilation.set(session)
    try:
        yield session
    finally:
        _compilation.reset(token)


@lru_cache
def _device_capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def capability_of(tensor: Tensor) -> int:
    """Compute capability tiles are chosen for: the tensor's device's.

    The interpreter has no device; it uses the smallest tiles' architecture.
    """
    session = _compilation.get()
    if session is not None:
        return session.capability
    if tensor.device.type != "cuda":
        return 86
    return _device_capability(tensor.device.index)


def programs_to_fill(tensor: Tensor) -> int:
    """Most programs that run at once: work is cut into so many, since a few more would take a
    second round. Two a multiprocessor of an H100."""
    return 264 if tensor.is_cuda or tensor.is_meta else 4


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    warps: int,
    registers: int = 0,
    **constants: Any,
) -> None:
    """Start (or, inside ``compile_only``, compile) ``kernel``; an empty grid starts nothing.

    ``registers`` caps a thread's registers, so that more blocks share a multiprocessor; 0 does
    not.
    """
    if registers:
        constants["maxnreg"] = registers
    session = _compilation.get()
    if session is not None:
        compiled = kernel.warmup(*arguments, grid=grid, num_warps=warps, **constants)
        session.kernels.append((kernel.__name__, {"warps": warps, **constants}, compiled))
        return
    if min(grid) == 0:
        return
    anchor = next(item for item in arguments if isinstance(item, Tensor))
    guard: Callable[[Any], contextlib.AbstractContextManager[Any]] = torch.cuda.device
    with guard(anchor.device) if anchor.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, num_warps=warps, **constants)
