"""Runner: a Decision bound to its backends; runs them and keeps their receipts."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .backend import Backend
from .call import Call, Gradients
from .call_spec import CallSpec, deterministic_mode
from .forcing import Forced
from .generation import current
from .policy import Policy
from .reasons import BackendRefused, Reason
from .receipts import Counter
from .registry import backends
from .routing import Decision, route
from .transforms import outside_autocast

CACHE_SIZE = 4096


def _plugin(name: str) -> Backend:
    backend = backends()[name].backend
    assert backend is not None
    return backend


class Runner:
    """Runs one decision: forward, and later its backward."""

    __slots__ = ("_backward", "_backward_ran", "_forward", "_forward_ran", "decision")

    def __init__(self, decision: Decision) -> None:
        assert decision.forward is not None
        self.decision = decision
        self._forward = _plugin(decision.forward)
        self._forward_ran = Counter("forward", decision.forward, decision.spec)
        self._backward: Backend | None = None
        if decision.backward is not None:
            self._backward = _plugin(decision.backward)
            self._backward_ran = Counter("backward", decision.backward, decision.spec)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Run the forward; an error of the backend is the caller's to see, never retried."""
        if torch.is_deterministic_algorithms_warn_only_enabled():
            self._warn_if_not_deterministic(self._forward, "forward")
        with outside_autocast(self.decision.spec.device_type):
            result = self._forward.forward(call)
        self._forward_ran.bump()
        return result

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        """Run the backward decided with the forward.

        Raises:
            BackendRefused: deterministic algorithms were switched on since the forward and
                this backward cannot honour them.
        """
        assert self._backward is not None
        if deterministic_mode() and not self.decision.spec.deterministic:
            self._require_deterministic(self._backward)
        elif torch.is_deterministic_algorithms_warn_only_enabled():
            self._warn_if_not_deterministic(self._backward, "backward")
        with outside_autocast(self.decision.spec.device_type):
            gradients = self._backward.backward(call, output, lse, grad_output, needs)
        self._backward_ran.bump()
        return gradients

    def _not_deterministic(self, backend: Backend, direction: str) -> tuple[Reason, ...]:
        spec = self.decision.spec._replace(deterministic=True)
        capabilities = backend.forward_capabilities
        if direction == "backward":
            assert backend.backward_capabilities is not None
            capabilities = backend.backward_capabilities
        return capabilities.reasons(spec)

    def _warn_if_not_deterministic(self, backend: Backend, direction: str) -> None:
        reasons = self._not_deterministic(backend, direction)
        if torch.are_deterministic_algorithms_enabled() and reasons:
            warnings.warn(
                f"{backend.name}'s {direction} is not deterministic for this call: {reasons[0]}",
                stacklevel=2,
            )

    def _require_deterministic(self, backward: Backend) -> None:
        reasons = self._not_deterministic(backward, "backward")
        if reasons:
            raise BackendRefused(
                "deterministic algorithms were switched on after the forward, and the backward "
                "decided then cannot honour them.",
                {backward.name: reasons},
            )


_runners: dict[tuple[CallSpec, Forced, Policy, int], Runner] = {}


def runner_for(spec: CallSpec, forced: Forced, policy: Policy) -> Runner:
    """The Runner for a call, routed on first sight and cached.

    Raises:
        BackendRefused: see ``csa_dispatch.routing.route``.
    """
    key = (spec, forced, policy, current())
    runner = _runners.get(key)
    if runner is None:
        if len(_runners) >= CACHE_SIZE:
            _runners.clear()
        runner = _runners[key] = Runner(route(spec, forced, policy))
    return runner
