"""Routing: from a CallSpec to a Decision, with a Reason for every backend passed over."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from .forcing import Forced
from .policy import Entry, Policy, policy_about
from .reasons import BackendRefused, Reason
from .registry import backends
from .settings import settings
from .spec import Spec

ENVIRONMENT_FIELDS = frozenset({"availability", "device_type", "capability"})
"""Reasons on these fields mean the backend is not for this machine, not that a call fell back."""


class FallbackWarning(UserWarning):
    """Automatic choice passed over a faster backend that is installed for this device."""


class Considered(NamedTuple):
    """One entry of the preference order and why it cannot run the call (empty: it can)."""

    entry: Entry
    reasons: tuple[Reason, ...]


class Decision(NamedTuple):
    """Which backend runs a call, why, and why not the others.

    Attributes:
        spec: the call: a CallSpec, or the spec of another operation.
        forward: the backend that runs the forward, or None when nothing can.
        backward: the backend that runs the backward; None when no gradient is needed.
        why: one sentence.
        policy: the policy's name.
        considered: every entry in preference order, with its Reasons.
        notes: what the chosen backends say about this call, e.g. a copy that is made.
    """

    spec: Any
    forward: str | None
    backward: str | None
    why: str
    policy: str
    considered: tuple[Considered, ...]
    notes: tuple[str, ...] = ()

    def refused(self) -> dict[str, tuple[Reason, ...]]:
        """Every entry that cannot run the call, with its Reasons."""
        return {str(item.entry): item.reasons for item in self.considered if item.reasons}

    def to_dict(self) -> dict[str, object]:
        """The decision as JSON-ready data."""
        return {
            "operation": self.spec.operation,
            "spec": {
                name: getattr(value, "value", value) for name, value in self.spec._asdict().items()
            },
            "forward": self.forward,
            "backward": self.backward,
            "why": self.why,
            "policy": self.policy,
            "considered": [
                {
                    "entry": str(item.entry),
                    "eligible": not item.reasons,
                    "reasons": [reason._asdict() for reason in item.reasons],
                }
                for item in self.considered
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"forward: {self.forward or 'none'}"]
        if self.spec.differentiable:
            lines.append(f"backward: {self.backward or 'none'}")
        lines += [f"why: {self.why}", f"policy: {self.policy}"]
        lines += [f"note: {note}" for note in self.notes]
        for item in self.considered:
            if item.reasons:
                lines.append(f"{item.entry} cannot run it:")
                lines += [f"  {reason}" for reason in item.reasons]
            else:
                lines.append(f"{item.entry} can run it")
        return "\n".join(lines)


def entry_reasons(spec: Spec, entry: Entry, *, hypothetical: bool = False) -> tuple[Reason, ...]:
    """Why ``entry`` cannot run ``spec``, forward and (when gradients are needed) backward.

    ``hypothetical`` asks about hardware that is not here: whether a backend's dependency is
    installed on this machine does not count then.
    """
    found: list[Reason] = []
    sides = [(entry.forward, "forward")]
    if spec.differentiable:
        sides.append((entry.backward, "backward"))
    for name, side in sides:
        row = backends().get(name)
        if row is None:
            remedy = "Install the package that provides it, or mend the policy."
            found.append(Reason("availability", "not installed", f"backend {name!r}", remedy))
            continue
        if row.backend is None or (not hypothetical and row.availability.reason is not None):
            assert row.availability.reason is not None
            found.append(row.availability.reason)
            if row.backend is None:
                continue
        implementation = row.backend.implementation(spec.operation)
        if implementation is None:
            names = ", ".join(("attention", *row.backend.operations))
            found.append(Reason("operation", spec.operation, names, "Name another backend."))
        elif side == "forward":
            found += implementation.forward_capabilities.reasons(spec)
        elif implementation.backward_capabilities is None:
            remedy = "Force another backward_backend, or run under torch.no_grad()."
            found.append(Reason("needs_grad", "True", "no gradients: it has no backward", remedy))
        else:
            found += implementation.backward_capabilities.reasons(spec)
    return tuple(dict.fromkeys(found))


def _forced_entries(forced: Forced, preferred: tuple[Entry, ...]) -> tuple[Entry, ...]:
    if forced.forward is not None:
        return (Entry(forced.forward, forced.backward or forced.forward),)
    if forced.backward is not None:
        names = dict.fromkeys(entry.forward for entry in preferred)
        return tuple(Entry(name, forced.backward) for name in names)
    return preferred


def _chosen_why(forced: Forced, rule_why: str, position: int) -> str:
    if forced.forward is not None or forced.backward is not None:
        return f"forced by {forced.source}"
    note = f" ({forced.note})" if forced.note else ""
    return f"policy rule {position + 1}" + (f": {rule_why}" if rule_why else "") + note


def _refused_why(forced: Forced, rule_why: str, position: int) -> str:
    """The sentence before the Reasons when nothing can run a call."""
    forward, backward, source = forced.forward, forced.backward, forced.source
    if forward is None and backward is None:
        rule = _chosen_why(forced, rule_why, position)
        return f"no backend of the policy can run this call ({rule})"
    if forward is None:
        what = f"backward_backend {backward} was forced by {source}"
        return f"{what}; no forward of the policy can run this call with it"
    if backward is None or backward == forward:
        return f"backend {forward} was forced by {source} but cannot run this call"
    what = f"backend {forward} and backward_backend {backward} were forced by {source}"
    return f"{what} but cannot run this call together"


def decide(spec: Spec, forced: Forced, policy: Policy, *, hypothetical: bool = False) -> Decision:
    """Weigh every entry of the preference order for ``spec``; never raises for a refusal.

    The first entry without Reasons is chosen. Forward and backward are one unit: when
    gradients are needed, an entry whose backward cannot run is out as a whole.
    """
    policy = policy_about(spec.operation, policy)
    position, rule = policy.rule_for(spec)
    considered = tuple(
        Considered(entry, entry_reasons(spec, entry, hypothetical=hypothetical))
        for entry in _forced_entries(forced, rule.prefer)
    )
    chosen = next((item.entry for item in considered if not item.reasons), None)
    if chosen is None:
        why = _refused_why(forced, rule.why, position)
        return Decision(spec, None, None, why, policy.name, considered)
    backward = chosen.backward if spec.differentiable else None
    notes: list[str] = []
    for name in dict.fromkeys((chosen.forward, backward)):
        row = backends().get(name) if name is not None else None
        if row is not None and row.backend is not None:
            implementation: Any = row.backend.implementation(spec.operation)
            notes += [f"{name}: {note}" for note in implementation.notes(spec)]
    why = _chosen_why(forced, rule.why, position)
    return Decision(spec, chosen.forward, backward, why, policy.name, considered, tuple(notes))


def route(spec: Spec, forced: Forced, policy: Policy) -> Decision:
    """The Decision for a call that is about to run.

    Raises:
        BackendRefused: the forced backend, or every entry of the policy, cannot run it; or a
            faster installed backend was passed over and CSA_DISPATCH_FALLBACK is "error".
    """
    decision = decide(spec, forced, policy)
    if decision.forward is None:
        raise BackendRefused(f"{decision.why}.", decision.refused())
    _notice_fallback(decision)
    return decision


_noticed: set[tuple[object, ...]] = set()


def _notice_fallback(decision: Decision) -> None:
    """Say once per distinct cause that a faster backend for this device was passed over.

    A cause is a bound that a call broke, whatever its value there: lengths that vary from call
    to call must not warn, and be remembered, one by one.
    """
    passed_over: dict[str, tuple[Reason, ...]] = {}
    for item in decision.considered:
        if not item.reasons:
            break
        if not any(reason.field in ENVIRONMENT_FIELDS for reason in item.reasons):
            passed_over[str(item.entry)] = item.reasons
    mode = settings().fallback
    if not passed_over or mode == "allow":
        return
    message = f"{decision.forward} runs a call that a faster backend could not."
    if mode == "error":
        raise BackendRefused(f"{message} CSA_DISPATCH_FALLBACK=error forbids it.", passed_over)
    causes = (
        (name, *((reason.field, reason.required) for reason in reasons))
        for name, reasons in passed_over.items()
    )
    key = (decision.forward, *causes)
    if key in _noticed:
        return
    _noticed.add(key)
    lines = [f"{name}: {reason}" for name, reasons in passed_over.items() for reason in reasons]
    warnings.warn(f"{message} {'; '.join(lines)}", FallbackWarning, stacklevel=4)
