"""Dispatch of operations beside attention: the same registry, forcing, policies and receipts.

A function of ``csa_dispatch.functional`` makes its call's spec and asks ``runner_of`` for what
runs it. ``explained_by`` tells ``explain()`` how to describe the function's calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .forcing import Forced, forced_for, traced_block
from .policy import current_policy
from .prepared import PLAIN_TYPES, undisturbed
from .runner import Runner, runner_for
from .settings import settings
from .spec import Spec
from .tracing import constant_when_traced
from .validation import fail

Function = TypeVar("Function", bound=Callable[..., Any])
_describers: dict[Callable[..., Any], Callable[..., Spec]] = {}


def explained_by(describe: Callable[..., Spec]) -> Callable[[Function], Function]:
    """Decorate an operation's function: ``describe`` makes a spec of the same arguments."""

    def register(function: Function) -> Function:
        _describers[function] = describe
        return function

    return register


def describer(function: Callable[..., Any]) -> Callable[..., Spec]:
    """What describes calls of ``function``.

    Raises:
        TypeError: it is no operation's function.
    """
    from . import functional  # noqa: F401 - its functions register here

    found = _describers.get(function)
    if found is None:
        known = ", ".join(item.__name__ for item in _describers)
        required = f"a query, a spec or one of the functions {known}"
        remedy = "For attention() pass its arguments alone."
        fail("explain()'s first argument", repr(function), required, remedy, TypeError)
    return found


def runner_of(spec: Spec, backend: str | None, backward_backend: str | None = None) -> Runner:
    """What runs the call, routed on first sight and cached.

    Raises:
        TypeError, ValueError: an argument or variable that is no known backend's name.
        BackendRefused: see ``csa_dispatch.routing.route``.
    """
    forced = forced_for(spec.operation, backend, backward_backend)
    return runner_for(spec, forced, current_policy(settings().policy))


def plain(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors may skip the opaque operators."""
    return undisturbed() and all(
        type(tensor) in PLAIN_TYPES and (tensor is None or not (tensor.is_meta or tensor.is_neg()))
        for tensor in tensors
    )


def traced_choice(
    operation: str, backend: str | None, backward_backend: str | None = None
) -> tuple[str, str]:
    """What is forced for a traced call, "" for routing's choice; stays in the graph."""
    block = traced_block()
    names = ("", "", "") if block is None else (block.forward, block.backward, block.source)
    return _constant_choice(operation, backend, backward_backend, *names)


@constant_when_traced
def _constant_choice(
    operation: str,
    backend: str | None,
    backward_backend: str | None,
    block_forward: str | None,
    block_backward: str | None,
    block_source: str,
) -> tuple[str, str]:
    block = Forced(block_forward, block_backward, block_source) if block_source else None
    forced = forced_for(operation, backend, backward_backend, block)
    return forced.forward or "", forced.backward or ""


def traced_runner(spec: Spec, backend: str, backward_backend: str = "") -> Runner:
    """The runner of a call inside an opaque operator, from what ``traced_choice`` kept."""
    source = "argument, context or environment when traced"
    forced = Forced(backend or None, backward_backend or None, source)
    return runner_for(spec, forced, current_policy(settings().policy))
