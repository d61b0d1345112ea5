"""Forcing: which backend the caller insists on. Precedence: argument, context, environment."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

import torch

from .registry import backends, known_backend
from .settings import settings
from .tracing import constant_when_traced


class Forced(NamedTuple):
    """Names the caller insists on, and who said so; None leaves the choice to the policy.

    ``note`` is what ``explain`` says of a name that was not taken.
    """

    forward: str | None
    backward: str | None
    source: str
    note: str = ""


NOT_FORCED = Forced(None, None, "policy")
# Innermost first. Leaving a block drops the head, so one use_backend object may be entered by
# several tasks or threads at once: each sees its own context's stack.
_context: ContextVar[tuple[Forced, ...]] = ContextVar("csa_dispatch_forced", default=())


# What tracing sees instead: dynamo follows a list's append and pop, not a ContextVar. Outside
# traced code this list is always empty.
_traced: list[Forced] = []


class use_backend:  # noqa: N801 - reads as a statement: `with use_backend("eager"):`
    """Run every ``attention()`` in the block on ``name``; nestable, async- and thread-safe.

    So do operations of ``csa_dispatch.functional`` that ``name`` implements; the policy chooses
    for the others.

    Args:
        name: backend for the forward and, unless ``backward`` names another, the backward.
            None lifts an outer block's choice of forward.
        backward: backend for the backward alone.

    The backward of a call made inside the block runs on the backend decided then, wherever
    ``.backward()`` is called. A call the backend cannot run raises with its Reasons.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str | None, *, backward: str | None = None) -> None:
        if name is not None:
            _check_name(name, "use_backend")
        if backward is not None:
            _check_name(backward, "use_backend backward")
        self._forced = Forced(name, backward, "use_backend")

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            _traced.append(self._forced)
        else:
            _context.set((self._forced, *_context.get()))

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            _traced.pop()
        else:
            _context.set(_context.get()[1:])


@constant_when_traced
def _check_name(name: str, source: str) -> None:
    known_backend(name, source)


def forced_by(backend: str | None, backward_backend: str | None) -> Forced:
    """What is forced for a call with these arguments, the first of the precedence that speaks.

    A level that names a forward also settles the backward; a level that names only a backward
    leaves the forward to the next level.

    Raises:
        TypeError, ValueError: an argument or variable that is no known backend's name.
    """
    if backend is not None or backward_backend is not None:
        if backend is not None:
            known_backend(backend, "backend")
        if backward_backend is not None:
            known_backend(backward_backend, "backward_backend")
        if backend is not None:
            return Forced(backend, backward_backend, "argument")
    stack = _context.get()
    outer = stack[0] if stack else _from_environment()
    if backward_backend is not None:
        return Forced(outer.forward, backward_backend, "argument")
    return outer


def forced_for(
    operation: str,
    backend: str | None,
    backward_backend: str | None = None,
    block: Forced | None = None,
) -> Forced:
    """``forced_by`` for an operation beside attention, which a backend may not implement.

    A name given as argument stands: what it cannot run is refused. A name from a context or the
    environment is about a whole program, so it counts where that backend implements the
    operation and leaves the choice to the policy where not.

    Args:
        block: what a block entered inside traced code forces; outranks context and environment.

    Raises:
        TypeError, ValueError: as ``forced_by``.
    """
    forced = forced_by(backend, backward_backend)
    if block is not None and backend is None:
        forced = Forced(block.forward, backward_backend or block.backward, block.source)
    names = [
        name
        for name, argument in ((forced.forward, backend), (forced.backward, backward_backend))
        if name is not None and argument is None and not _implements(name, operation)
    ]
    if not names:
        return forced
    missing = " and ".join(dict.fromkeys(names))
    return Forced(
        None if forced.forward in names and backend is None else forced.forward,
        None if forced.backward in names and backward_backend is None else forced.backward,
        forced.source,
        f"{forced.source} names {missing}, which has no {operation}",
    )


def _implements(name: str, operation: str) -> bool:
    """Whether a backend has the operation; one that is broken is not let off by that."""
    backend = backends()[name].backend
    return backend is None or backend.implementation(operation) is not None


def check_reached(chosen: str | None) -> None:
    """Raise if the block around a running graph forces another backend than the graph chose.

    Raises:
        RuntimeError: the graph was traced outside that block, so forcing cannot reach it.
    """
    stack = _context.get()
    if stack and stack[0].forward not in (None, chosen):
        raise RuntimeError(
            f"use_backend({stack[0].forward!r}) surrounds a graph that was traced without it, "
            f"where attention() runs {chosen}. Enter the block inside the traced function, or "
            "call torch.compiler.reset() and trace it again inside the block."
        )


def traced_block() -> Forced | None:
    """What the innermost block entered inside traced code forces."""
    return _traced[-1] if _traced else None


def traced_arguments(
    backend: str | None, backward_backend: str | None
) -> tuple[str | None, str | None]:
    """A traced call's arguments, filled from the blocks entered inside the traced code."""
    if backend is None and _traced:
        innermost = _traced[-1]
        backend = innermost.forward
        if backward_backend is None:
            backward_backend = innermost.backward
    return backend, backward_backend


def _from_environment() -> Forced:
    known = settings()
    if known.backend is None and known.backward_backend is None:
        return NOT_FORCED
    if known.backend is not None:
        known_backend(known.backend, "CSA_DISPATCH_BACKEND")
    if known.backward_backend is not None:
        known_backend(known.backward_backend, "CSA_DISPATCH_BACKWARD_BACKEND")
    return Forced(known.backend, known.backward_backend, "environment")
