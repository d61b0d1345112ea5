"""Runner: a Decision bound to its backends; runs them and keeps their receipts."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .backend import Backend, Operation
from .call_spec import deterministic_mode
from .forcing import Forced
from .generation import current
from .policy import Policy
from .reasons import BackendRefused, Reason
from .receipts import Counter
from .registry import backends
from .routing import Decision, route
from .spec import Spec
from .transforms import any_autocast, outside_autocast

CACHE_SIZE = 4096


def _implementation(name: str, operation: str) -> Backend | Operation:
    backend = backends()[name].backend
    assert backend is not None
    found = backend.implementation(operation)
    assert found is not None
    return found


class Runner:
    """Runs one decision: forward, and later its backward.

    What goes in and comes out is the operation's: for attention see ``Backend``.
    """

    __slots__ = ("_backward", "_backward_ran", "_forward", "_forward_ran", "decision")

    def __init__(self, decision: Decision) -> None:
        assert decision.forward is not None
        self.decision = decision
        operation = decision.spec.operation
        self._forward = _implementation(decision.forward, operation)
        self._forward_ran = Counter("forward", decision.forward, decision.spec)
        self._backward: Backend | Operation | None = None
        if decision.backward is not None:
            self._backward = _implementation(decision.backward, operation)
            self._backward_ran = Counter("backward", decision.backward, decision.spec)

    @property
    def backward_uses_lse(self) -> bool:
        """Whether an attention backward takes the probabilities from the lse it is given."""
        return isinstance(self._backward, Backend) and self._backward.backward_uses_lse

    def forward(self, call: Any) -> Any:
        """Run the forward; an error of the backend is the caller's to see, never retried."""
        if torch.is_deterministic_algorithms_warn_only_enabled():
            self._warn_if_not_deterministic("forward")
        if any_autocast():
            with outside_autocast(self.decision.spec.device_type):
                result = self._forward.forward(call)
        else:
            result = self._forward.forward(call)
        self._forward_ran.bump()
        return result

    def backward(self, call: Any, *saved: Any) -> Any:
        """Run the backward decided with the forward.

        Raises:
            BackendRefused: deterministic algorithms were switched on since the forward and
                this backward cannot honour them.
        """
        assert self._backward is not None
        self.check_backward()
        if torch.is_deterministic_algorithms_warn_only_enabled():
            self._warn_if_not_deterministic("backward")
        with outside_autocast(self.decision.spec.device_type):
            gradients = self._backward.backward(call, *saved)
        self._backward_ran.bump()
        return gradients

    def check_backward(self) -> None:
        """Whether ``backward`` would run now; ranks ask before they send each other anything.

        Raises:
            BackendRefused: as ``backward``.
        """
        if deterministic_mode() and not self.decision.spec.deterministic:
            self._require_deterministic()

    def _not_deterministic(self, direction: str) -> tuple[Reason, ...]:
        spec = self.decision.spec._replace(deterministic=True)
        capabilities = self._forward.forward_capabilities
        if direction == "backward":
            assert self._backward is not None
            assert self._backward.backward_capabilities is not None
            capabilities = self._backward.backward_capabilities
        return capabilities.reasons(spec)

    def _warn_if_not_deterministic(self, direction: str) -> None:
        reasons = self._not_deterministic(direction)
        if torch.are_deterministic_algorithms_enabled() and reasons:
            name = getattr(self.decision, direction)
            warnings.warn(
                f"{name}'s {direction} is not deterministic for this call: {reasons[0]}",
                stacklevel=2,
            )

    def _require_deterministic(self) -> None:
        reasons = self._not_deterministic("backward")
        if reasons:
            assert self.decision.backward is not None
            raise BackendRefused(
                "deterministic algorithms were switched on after the forward, and the backward "
                "decided then cannot honour them.",
                {self.decision.backward: reasons},
            )


_runners: dict[tuple[str, Spec, Forced, Policy, int], Runner] = {}


def runner_for(spec: Spec, forced: Forced, policy: Policy) -> Runner:
    """The Runner for a call, routed on first sight and cached.

    Raises:
        BackendRefused: see ``csa_dispatch.routing.route``.
    """
    # Specs of two operations may be equal as tuples.
    key = (spec.operation, spec, forced, policy, current())
    runner = _runners.get(key)
    if runner is None:
        if len(_runners) >= CACHE_SIZE:
            _runners.clear()
        runner = _runners[key] = Runner(route(spec, forced, policy))
    return runner
