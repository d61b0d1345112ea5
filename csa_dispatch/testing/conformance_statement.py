"""Whether a statement of capabilities says of itself what is so."""

from __future__ import annotations

from collections.abc import Iterator

from csa_dispatch.backend import Backend
from csa_dispatch.capabilities import Allowed, Capabilities, Claims
from csa_dispatch.operations import AnySpec
from csa_dispatch.reasons import Reason

from .conformance_report import Finding


def stated(side: str, capabilities: Claims, spec: AnySpec) -> Iterator[Finding]:
    """Look at every bound and predicate; ``spec`` is any call of the operation."""
    for name, allowed in capabilities.bounds().items():
        what = f"{side} {name}"
        if not isinstance(allowed, Allowed):
            yield Finding(what, f"is {allowed!r}, not a set of allowed values")
            continue
        claimed = [value for value in allowed.outside() if value in allowed]
        missing = [value for value in allowed.inside() if value not in allowed]
        faults = [f"allows {value!r}, which it calls outside" for value in claimed]
        faults += [f"does not allow {value!r}, which it calls inside" for value in missing]
        yield Finding(what, "; ".join(faults))
        yield Finding(f"{what} in words", "" if allowed.describe() else "is empty")
    for predicate in capabilities.predicates:
        what = f"{side} {predicate.__name__}"
        documented = bool((predicate.__doc__ or "").strip())
        yield Finding(what, "" if documented else "has no docstring")
        try:
            reason: object = predicate(spec)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            yield Finding(what, f"raises {raised}; it must return a Reason or None")
            continue
        right = reason is None or isinstance(reason, Reason)
        yield Finding(what, "" if right else f"gives {reason!r}, not a Reason or None")
    for field, _ in capabilities.remedies:
        bounded = field in capabilities.bounds()
        yield Finding(f"{side} remedy of {field}", "" if bounded else "is for no bound")


def claims_fault(backend: Backend) -> str:
    """What a backend has in place of claims about ``attention()``; empty when it has some."""
    sides = {
        "forward_capabilities": getattr(backend, "forward_capabilities", None),
        "backward_capabilities": backend.backward_capabilities or Capabilities(),
    }
    for name, claims in sides.items():
        if not isinstance(claims, Capabilities):
            return f"{name} is {claims!r}; it must be Capabilities"
        for field, allowed in claims.bounds().items():
            if not isinstance(allowed, Allowed):
                return f"{name} has {field}={allowed!r}; it must be a set, such as OneOf"
    return ""


def notes_fault(notes: object) -> str:
    """What is wrong with an implementation's notes; empty when nothing is."""
    right = isinstance(notes, tuple) and all(isinstance(note, str) for note in notes)
    return "" if right else f"are {notes!r}, not a tuple of str"
