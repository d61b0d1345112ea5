"""How kernels are started: on their tensors' own device, or only compiled.

Every launch goes through ``launch``. Inside ``compile_only`` it compiles instead, for a given
architecture, from the same launch code and from tensors that need not hold data (meta tensors
do): that is how shapes are warmed up and how all architectures are checked without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from .cache_keys import settle_key
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


class _Ready(NamedTuple):
    """A compiled kernel and the values of its constants, in the order of its parameters."""

    compiled: Any
    constants: tuple[Any, ...]


_ready: dict[tuple[Any, ...], _Ready] = {}
READY_LIMIT = 8192
"""Launches remembered; more shapes than that begin anew."""


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

    A launch like one before (same numbers, dtypes and alignments) starts the kernel that served
    it. Triton would find that kernel too, but takes longer over it than small calls run.
    """
    if registers:
        constants["maxnreg"] = registers
    session = _compilation.get()
    if session is not None:
        settle_key(kernel)
        compiled = kernel.warmup(*arguments, grid=grid, num_warps=warps, **constants)
        session.kernels.append((kernel.__name__, {"warps": warps, **constants}, compiled))
        return
    if min(grid) == 0:
        return
    anchor = next(item for item in arguments if isinstance(item, Tensor))
    if not anchor.is_cuda:
        kernel[grid](*arguments, num_warps=warps, **constants)
    elif torch.cuda.current_device() == anchor.device.index:
        _start(kernel, grid, arguments, warps, constants)
    else:
        with torch.cuda.device(anchor.device):
            _start(kernel, grid, arguments, warps, constants)


def _launches_watched() -> bool:
    """Whether a profiler asked Triton to tell it of launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    warps: int,
    constants: dict[str, Any],
) -> None:
    device = torch.cuda.current_device()
    described = [
        item
        if type(item) is int
        else (item.dtype, item.data_ptr() % 16)
        if isinstance(item, Tensor)
        else item
        for item in arguments
    ]
    # Its id: a kernel's hash is its key in the cache, which Triton may yet have to work out.
    key = (id(kernel), device, warps, *described, *constants.items())
    ready = _ready.get(key)
    if ready is not None:
        compiled, sizes = ready.compiled, (*grid, 1, 1)[:3]
        if _launches_watched():
            compiled[sizes](*arguments, *ready.constants)
        else:
            # What that does (Triton 3.6 to 3.9), without the telling of hooks.
            stream = driver.active.get_current_stream(device)  # pyright: ignore
            handles = stream, compiled.function, compiled.packed_metadata
            compiled.run(*sizes, *handles, None, None, None, *arguments, *ready.constants)
        return
    settle_key(kernel)
    compiled = kernel[grid](*arguments, num_warps=warps, **constants)
    rest = kernel.arg_names[len(arguments) :]
    # An interpreted kernel is not compiled; one with defaults has values unknown here.
    if compiled is not None and all(name in constants for name in rest):
        if len(_ready) >= READY_LIMIT:
            _ready.clear()
        _ready[key] = _Ready(compiled, tuple(constants[name] for name in rest))
