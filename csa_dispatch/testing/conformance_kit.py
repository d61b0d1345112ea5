"""One backend under observation: its claimed calls, run among guards and judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.backend import Backend
from csa_dispatch.call import Gradients
from csa_dispatch.call_spec import GRADIENT_INPUTS, CallSpec, device_capability, spec_of
from csa_dispatch.capabilities import Capabilities
from csa_dispatch.policy import Entry
from csa_dispatch.reasons import BackendRefused
from csa_dispatch.registry import backends, register_backend, unregister_backend

from .budgets import TensorVerdict, gradient_tensors
from .cases import Case, Inputs, build, to_call
from .check import (
    Outcome,
    Reference,
    backend_run,
    bits,
    deterministic_algorithms,
    gradient_faults,
    innermost,
    judge_outcome,
    layout_faults,
    reference_for,
    run_backward,
    run_forward,
)
from .conformance_cases import Axes, device_axes, device_bases
from .conformance_report import Finding
from .covering import cases_for, claims
from .guards import guard_inputs, shared_memory
from .targets import targets


class NotClaimed(Exception):
    """A check has nothing to look at; the message says what the backend does not claim."""


class Observation(NamedTuple):
    """One guarded run of one call.

    Attributes:
        what: the call's name.
        verdicts: of the tensors that came back.
        error: what the backend raised, empty when it returned.
        gradients: missing and superfluous ones.
        form: wrong dtypes, shapes and strides.
        written: inputs that were modified.
        overrun: inputs beside which memory was written.
        shared: results that lie in an input's memory.
    """

    what: str
    verdicts: tuple[TensorVerdict, ...] = ()
    error: str = ""
    gradients: tuple[str, ...] = ()
    form: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    overrun: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def judged(self) -> Finding:
        """Whether what came back is what was asked for, and every number right."""
        messages = [f"{item.name}: {item.message}" for item in self.verdicts if not item.passed]
        messages += self.gradients
        share = max((item.share for item in self.verdicts), default=None)
        return Finding(self.what, self.error or "; ".join(messages), share)


class Kit:
    """A backend, where it runs, and what it claims there.

    Attributes:
        backend: the backend under test.
        forward: whose forward runs: the backend's own, or eager PyTorch's when the backend
            claims no forward on the device but a backward.
        backward: what its backward claims, or None when that is nothing on the device.
        device: where the calls run.
        full: whether to cover pairs of values rather than values.
        entry: names of forward and backward, to force them.
        plain_run: runs their functions, without guards and without the dispatcher.
    """

    def __init__(self, backend: Backend, device: torch.device, *, full: bool) -> None:
        self.backend = backend
        self.device = device
        self.full = full
        self.capability = device_capability(device)
        self.forward = backend
        self.backward = backend.backward_capabilities
        self._observed: dict[str, Observation] = {}
        if not self._claimed(backend.forward_capabilities):
            eager = backends()["eager"].backend
            if self.backward is not None and eager is not None:
                self.forward = eager
        elif self.backward is not None and not self._claimed(self.backward):
            self.backward = None
        self._find = partial(
            cases_for, *self.sides, device_type=device.type, capability=self.capability
        )
        self._bases = device_bases(self.sides, self._find)
        self.entry = Entry(self.forward.name, backend.name)
        self.plain_run = backend_run(self.forward, backend)

    @property
    def sides(self) -> tuple[Capabilities, Capabilities | None]:
        """What the forward and the backward that run here claim."""
        return self.forward.forward_capabilities, self.backward

    def _claimed(self, side: Capabilities) -> bool:
        """Whether any call is claimed on this device."""
        return bool(cases_for(side, device_type=self.device.type, capability=self.capability,
                              strength=1))  # fmt: skip

    def cases(self, axes: Axes, *, whole_claim: bool = False) -> list[Case]:
        """Claimed cases that vary ``axes``.

        With ``whole_claim`` the full level takes every axis as wide as the claim.

        Raises:
            NotClaimed: there are none.
        """
        chosen: list[Axes] = [{}]
        if not (self.full and whole_claim):
            chosen = [device_axes(axes, base, self.sides, self._find) for base in self._bases]
        strength = 2 if self.full else 1
        found = [case for each in chosen for case in self._find(axes=each, strength=strength)]
        if self.forward is not self.backend:
            found = [case for case in found if case.differentiable]
        if not found:
            raise NotClaimed("the backend claims no such call on this device")
        return found

    def claims(self, spec: CallSpec) -> bool:
        return claims(*self.sides, spec)

    def claims_inputs(self, inputs: Inputs) -> bool:
        """Whether the call that these inputs make is claimed."""
        return self.claims(spec_of(to_call(inputs), inputs.needs_grad))

    def reference(self, case: Case) -> Reference:
        """A case's data and targets; hand out copies of the data, never the data."""
        if case.tokens * case.heads * case.head_dim <= _KEPT:
            return _kept_reference(case, self.device)
        return reference_for(case, self.device)

    def judged(self, cases: Iterable[Case]) -> Iterator[Finding]:
        """Run and judge every case."""
        for case in cases:
            yield self.observe(case).judged()

    def observe(self, case: Case) -> Observation:
        """The guarded run of a case, made once."""
        if case.name not in self._observed:
            with deterministic_algorithms(case.deterministic):
                self._observed[case.name] = self.run(case.name, self.reference(case))
        return self._observed[case.name]

    @property
    def observed(self) -> list[Observation]:
        """Every guarded run so far."""
        return list(self._observed.values())

    def run(self, what: str, reference: Reference) -> Observation:
        """Run forward and backward on guarded copies of the inputs, and look at what came."""
        inputs, guards = guard_inputs(reference.inputs)
        guarded = reference._replace(inputs=inputs)
        try:
            outcome, spoiled = self._watched(inputs)
        except BackendRefused as refusal:
            return Observation(what, error=f"claimed, but refused: {refusal}")
        except Exception as error:
            message = f"{type(error).__name__}: {error} (at {innermost(error)})"
            return Observation(what, error=message)
        results = {
            "output": outcome.output,
            "lse": outcome.lse,
            **gradient_tensors(outcome.gradients),
        }
        return Observation(
            what,
            tuple(judge_outcome(guarded, outcome)),
            gradients=tuple(gradient_faults(guarded, outcome)),
            form=(*layout_faults(guarded, outcome), *_form_faults(guarded, results)),
            written=(*(name for name, guard in guards.items() if guard.modified()), *spoiled),
            overrun=tuple(name for name, guard in guards.items() if guard.overrun()),
            shared=tuple(shared_memory(results, guards)),
        )

    def _watched(self, inputs: Inputs) -> tuple[Outcome, list[str]]:
        """Forward and backward, and which of the forward's results the backward wrote to."""
        call, needs = to_call(inputs), inputs.needs_grad
        output, lse = run_forward(self.forward, call)
        if not any(needs):
            return Outcome(output, lse, Gradients(None, None, None, None)), []
        saved = {"output": (output, output.clone()), "lse": (lse, lse.clone())}
        gradients = run_backward(self.backend, call, output, lse, inputs.grad_output, needs)
        spoiled = [
            name for name, (now, then) in saved.items() if not torch.equal(bits(now), bits(then))
        ]
        return Outcome(output, lse, gradients), spoiled

    @contextmanager
    def registered(self) -> Iterator[None]:
        """The backend under its name in the registry, for ``attention()`` to be forced to it."""
        name = self.backend.name
        known = backends().get(name)
        if known is not None and known.backend is self.backend:
            yield
            return
        register_backend(self.backend, replace=True)
        try:
            yield
        finally:
            if known is not None and known.backend is not None:
                register_backend(known.backend, replace=True)
            else:
                unregister_backend(name)


@contextmanager
def no_sync() -> Iterator[None]:
    """In the block, what waits for a CUDA device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _form_faults(reference: Reference, results: dict[str, Tensor | None]) -> Iterator[str]:
    for name, result in results.items():
        target = reference.targets.get(name)
        if target is None or result is None:
            continue
        found, wanted = (result.dtype, result.shape), (target.dtype, target.value.shape)
        if found != wanted:
            yield f"{name} is {found[0]} {tuple(found[1])}, must be {wanted[0]} {tuple(wanted[1])}"
        if result.device != reference.inputs.query.device:
            yield f"{name} is on {result.device}"
        if result.requires_grad:
            yield f"{name} carries an autograd graph"


_KEPT = 2**14
"""Query elements up to which references are kept: small ones recur, large ones fill memory."""


@lru_cache(maxsize=512)
def _kept_reference(case: Case, device: torch.device) -> Reference:
    return reference_for(case, device)


def expanded_reference(case: Case, device: torch.device) -> Reference:
    """A case with everything at stride 0 that can be: heads, KV rows, slots, upstream gradient.

    ``output.sum().backward()`` brings such a gradient, a shared selection such slots.
    """
    made = build(case, device)
    inputs = made._replace(
        query=_spread(made.query, 1),
        local_kv=_spread(made.local_kv, 2),
        sparse_kv=_spread(made.sparse_kv, 2),
        kv_indices=_spread(made.kv_indices, 1),
        attention_sink=_spread(made.attention_sink, 0),
        grad_output=_spread(made.grad_output, 0, 1, 2, 3),
    )
    return _reference_of(inputs, made.needs_grad)


def upstream_reference(case: Case, device: torch.device, dim: int) -> Reference:
    """A case with its upstream gradient at stride 0 in one dimension, as of a mean over it."""
    made = build(case, device)
    inputs = made._replace(grad_output=_spread(made.grad_output, dim))
    return _reference_of(inputs, made.needs_grad)


def _spread(tensor: Tensor | None, *dims: int) -> Tensor | None:
    """The first elements along ``dims``, expanded to the tensor's shape."""
    if tensor is None:
        return None
    shape = tensor.shape
    for dim in dims:
        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor.detach().expand(shape)


def continued_reference(case: Case, device: torch.device) -> Reference:
    """The second half of a packed case: what a later part of a sequence computes.

    A document that began in the first half has a negative offset.
    """
    made = build(case, device)
    first = case.tokens // 2

    def later(tensor: Tensor, dim: int) -> Tensor:
        return tensor.detach().narrow(dim, first, case.tokens - first).contiguous()

    assert made.cu_seqlens is not None
    inputs = made._replace(
        query=later(made.query, 2),
        local_kv=later(made.local_kv, 2),
        sparse_kv=None if made.sparse_kv is None else made.sparse_kv.detach().clone(),
        kv_indices=None if made.kv_indices is None else later(made.kv_indices, 1),
        attention_sink=None
        if made.attention_sink is None
        else made.attention_sink.detach().clone(),
        cu_seqlens=made.cu_seqlens - first,
        grad_output=later(made.grad_output, 2),
    )
    return _reference_of(inputs, made.needs_grad)


def half_reference(case: Case, device: torch.device) -> Reference:
    """A case whose results of the first half of the tokens nobody uses: their gradient is 0."""
    made = build(case, device)
    grad_output = made.grad_output.detach().clone()
    grad_output[:, :, : case.tokens // 2] = 0
    return _reference_of(made._replace(grad_output=grad_output), made.needs_grad)


def _reference_of(inputs: Inputs, needs_grad: tuple[bool, ...]) -> Reference:
    for name, wanted in zip(GRADIENT_INPUTS, needs_grad, strict=True):
        if wanted:
            getattr(inputs, name).requires_grad_()
    call = to_call(inputs)
    return Reference(inputs, call, targets(call, inputs.grad_output))
