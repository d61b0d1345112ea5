"""The checks of the conformance kit that are not about numbers alone; ``FAMILIES`` are those."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from csa_dispatch.backend import Availability
from csa_dispatch.call_spec import CallSpec
from csa_dispatch.reasons import BackendRefused
from csa_dispatch.receipts import record_receipts

from .boundary import check_boundary
from .cases import Case, Inputs, to_call
from .check import (
    Outcome,
    Reference,
    Run,
    attention_run,
    backend_run,
    deterministic_algorithms,
    identical,
    judge_outcome,
    run_backward,
)
from .conformance_cases import ALL, FAMILIES, MESSY, NONE, Axes, Family
from .conformance_kit import (
    Kit,
    NotClaimed,
    Observation,
    continued_reference,
    expanded_reference,
    half_reference,
    no_sync,
    upstream_reference,
)
from .conformance_operations import OPERATION_CHECKS
from .conformance_report import Finding
from .conformance_statement import notes_fault, stated
from .covering import boundaries_for
from .field_case import check_field_case
from .field_cases import DTYPES as FIELD_DTYPES
from .field_cases import field_cases
from .guards import NanInNewMemory, guard_inputs
from .mutants import PlainBackend

AVAILABILITY = "availability"
"""The check without which no later one makes sense."""
RUNS = 10
"""Runs that must be equal in every bit where determinism is claimed."""

_DETERMINISTIC = {
    "deterministic": (True,),
    "content": ("duplicates",),
    "slots": (9, 5),
    "sink": ("float32", "none"),
}
_LAYOUTS = ("BHSD", "BSHD", "SBHD", "THD")
_SLOW_FIELD_CASES = ("G16", "G18", "G30")
"""Field cases that only the full level runs: many heads, many slots, gigabytes of addresses."""


class Check(NamedTuple):
    """One named check: ``run`` yields what it looked at, or raises ``NotClaimed``."""

    name: str
    promise: str
    run: Callable[[Kit], Iterable[Finding]]


def _availability(kit: Kit) -> Iterator[Finding]:
    found: object = kit.backend.probe()
    if not isinstance(found, Availability):
        yield Finding("probe", f"returned {found!r}; it must return an Availability")
        return
    reason = found.reason
    yield Finding("probe", "" if reason is None else f"cannot run here: {reason}")
    if reason is None:
        try:
            kit.cases({})
            yield Finding("device")
        except NotClaimed:
            yield Finding("device", f"no call on {kit.device.type} is claimed")


def _statement(kit: Kit) -> Iterator[Finding]:
    backend = kit.backend
    for field in ("name", "summary", "evidence"):
        value = getattr(backend, field)
        yield Finding(field, "" if value and isinstance(value, str) else f"is {value!r}")
    sides = {"forward": backend.forward_capabilities, "backward": backend.backward_capabilities}
    for side, capabilities in sides.items():
        if capabilities is not None:
            yield from stated(side, capabilities, CallSpec())
    for spec in (CallSpec(), CallSpec(device_type="cuda", capability=90, needs_grad=ALL)):
        yield Finding("notes", notes_fault(backend.notes(spec)))


def _refusals(kit: Kit) -> Iterator[Finding]:
    outside = {
        (name, value): f"{name}={getattr(value, 'value', value)}"
        for side in kit.sides
        if side is not None
        for name, allowed in side.bounds().items()
        for value in allowed.outside()
    }
    if not outside:
        raise NotClaimed("the claims name no value outside themselves")
    with kit.registered():
        for boundary in boundaries_for(
            *kit.sides, device_type=kit.device.type, capability=kit.capability
        ):
            what = outside.pop((boundary.field, getattr(boundary.spec, boundary.field)), "")
            message = check_boundary(boundary, kit.entry, kit.device).message
            yield Finding(what or boundary.field, message)
    for what in outside.values():
        yield Finding(what, "no bound refuses it")


def _family(family: Family) -> Callable[[Kit], Iterator[Finding]]:
    def run(kit: Kit) -> Iterator[Finding]:
        return kit.judged(kit.cases(family.axes, whole_claim=family.name == "claims"))

    def strides(kit: Kit) -> Iterator[Finding]:
        yield from run(kit)
        for case in kit.cases({}):
            reference = expanded_reference(case, kit.device)
            if kit.claims_inputs(reference.inputs):
                yield kit.run(f"{case.name}-all expanded", reference).judged()
        by_kind = {case.kind: case for case in kit.cases({"batch": (1, 2)})}
        for case in by_kind.values():
            for dim in range(4) if case.differentiable else ():
                reference = upstream_reference(case, kit.device, dim)
                what = f"{case.name}-upstream expanded in dim {dim}"
                yield kit.run(what, reference).judged()

    return strides if family.name == "strides" else run


def _observed(
    aspect: Callable[[Observation], tuple[str, ...]], sentence: str
) -> Callable[[Kit], Iterator[Finding]]:
    """A check of one aspect of every guarded run, of earlier checks too."""

    def run(kit: Kit) -> Iterator[Finding]:
        for case in kit.cases(MESSY):
            kit.observe(case)
        for item in kit.observed:
            found = aspect(item)
            message = sentence.format("; ".join(found)) if found else ""
            yield Finding(item.what, message or item.error)

    return run


def _judged_run(kit: Kit, case: Case, run: Run) -> Finding:
    """Run a case on a copy of its inputs and judge what comes."""
    reference = kit.reference(case)
    inputs, _ = guard_inputs(reference.inputs)
    try:
        outcome = run(inputs)
    except Exception as error:
        return Finding(case.name, f"{type(error).__name__}: {error}")
    return _verdict(case.name, reference, outcome)


def _verdict(what: str, reference: Reference, outcome: Outcome) -> Finding:
    return Observation(what, tuple(judge_outcome(reference, outcome))).judged()


def _unwritten(kit: Kit) -> Iterator[Finding]:
    def poisoned(inputs: Inputs) -> Outcome:
        with NanInNewMemory():
            return kit.plain_run(inputs)

    # Memory is poisoned by a dispatch mode, under which calls are traced.
    for case in _traced(kit, MESSY):
        yield _judged_run(kit, case, poisoned)


def _pairing(kit: Kit) -> Iterator[Finding]:
    run = backend_run(PlainBackend(), kit.backend)
    cases = [case for case in kit.cases(MESSY) if case.differentiable]
    if not cases:
        raise NotClaimed("the backend claims no backward")
    for case in cases:
        yield _judged_run(kit, case, run)
        if kit.backend.backward_uses_lse:
            yield _half_left_out(kit, case)


def _half_left_out(kit: Kit, case: Case) -> Finding:
    """Rows whose lse is +inf give no gradient, whatever the upstream gradient holds there."""
    reference = half_reference(case, kit.device)
    inputs, _ = guard_inputs(reference.inputs)
    grad_output = kit.reference(case).inputs.grad_output
    what = f"{case.name}, lse of the first half +inf"
    try:
        output, lse = PlainBackend().forward(to_call(inputs))
        half = lse.clone()
        half[:, :, : case.tokens // 2] = math.inf
        gradients = run_backward(
            kit.backend, to_call(inputs), output, half, grad_output, inputs.needs_grad
        )
    except Exception as error:
        return Finding(what, f"{type(error).__name__}: {error}")
    return _verdict(what, reference, Outcome(output, lse, gradients))


def _determinism(kit: Kit) -> Iterator[Finding]:
    try:
        cases = kit.cases(_DETERMINISTIC)
    except NotClaimed:
        raise NotClaimed("the backend does not claim determinism") from None
    for case in cases:
        reference = kit.reference(case)
        with deterministic_algorithms(True):
            outcomes = [kit.plain_run(guard_inputs(reference.inputs)[0]) for _ in range(RUNS)]
        other = sum(not identical(outcomes[0], outcome) for outcome in outcomes[1:])
        message = f"{other} of {RUNS} runs differ from the first" if other else ""
        yield Finding(case.name, message)
        yield _verdict(case.name, reference, outcomes[0])


def _attention(kit: Kit) -> Iterator[Finding]:
    axes = {"needs_grad": (ALL, NONE, (False, True, False, False)), "sink": ("float32", "none")}
    with kit.registered():
        for case, layout in zip(kit.cases(axes), itertools.cycle(_LAYOUTS), strict=False):
            layout = layout if case.batch == 1 else "BHSD"
            run = attention_run(kit.entry.forward, kit.entry.backward, layout)
            with record_receipts() as receipts:
                yield _judged_run(kit, case, run)
            wanted = [("forward", kit.entry.forward)]
            if case.differentiable:
                wanted.append(("backward", kit.entry.backward))
            found = [(receipt.direction, receipt.backend) for receipt in receipts]
            message = "" if found == wanted else f"are {found}, must be {wanted}"
            yield Finding(f"receipts of {case.name}", message)


def _traced(kit: Kit, axes: Axes) -> list[Case]:
    """Claimed cases that are claimed when traced, too."""
    traced = [
        case
        for case in kit.cases(axes)
        if kit.claims(case.spec(kit.device.type, kit.capability)._replace(tracing=True))
    ]
    if not traced:
        raise NotClaimed("the backend does not claim traced calls")
    return traced


def _operators(kit: Kit) -> Iterator[Finding]:
    traced = _traced(kit, {"documents": ("none", "cu_seqlens", "doc_ids")})
    with kit.registered():
        for case in {case.kind: case for case in traced}.values():
            yield Finding(case.name, _opcheck(kit, case))


def _opcheck(kit: Kit, case: Case) -> str:
    """What ``torch.library.opcheck`` finds wrong with the operators run by the backend."""
    inputs, _ = guard_inputs(kit.reference(case).inputs)
    detached = to_call(inputs)
    leaves = {name: getattr(inputs, name) for name in detached._fields[:8]}
    rest = ([*case.needs_grad], *kit.entry)
    operators = torch.ops.csa_dispatch
    tests = ("test_schema", "test_faketensor")
    forward = (*tests, "test_autograd_registration", *["test_aot_dispatch_dynamic"] * kit.full)
    try:
        torch.library.opcheck(
            operators.attention.default,
            (*detached._replace(**leaves), *rest, False),
            test_utils=forward,
        )
        if case.differentiable:
            output, lse = kit.forward.forward(detached)
            torch.library.opcheck(
                operators.attention_backward.default,
                (inputs.grad_output, output, lse, *detached, *rest),
                test_utils=tests,
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _sync(kit: Kit) -> Iterator[Finding]:
    if kit.device.type != "cuda":
        raise NotClaimed("a matter of CUDA devices")
    for case in kit.cases({"documents": ("none", "cu_seqlens", "doc_ids")}):
        inputs, _ = guard_inputs(kit.reference(case).inputs)
        try:
            kit.plain_run(inputs)  # compiles what it compiles
            torch.cuda.synchronize(kit.device)
            with no_sync():
                kit.plain_run(inputs)
            yield Finding(case.name)
        except RuntimeError as error:
            yield Finding(case.name, str(error))


def _continued(kit: Kit) -> Iterator[Finding]:
    for case in kit.cases({"documents": ("cu_seqlens",), "content": ("messy",)}):
        if case.documents == "cu_seqlens":
            yield kit.run(f"continued-{case.name}", continued_reference(case, kit.device)).judged()


def _field_cases(kit: Kit) -> Iterator[Finding]:
    def run(inputs: Inputs) -> Outcome:
        if not kit.claims_inputs(inputs):
            raise BackendRefused("not claimed", {})
        try:
            return kit.plain_run(inputs)
        except BackendRefused as refusal:
            raise RuntimeError(f"claimed, but refused: {refusal}") from refusal

    bound = kit.backend.forward_capabilities.dtype
    dtypes = tuple(dtype for dtype in FIELD_DTYPES if dtype in bound)
    found = False
    for case in field_cases(dtypes if kit.full else dtypes[:1]):
        if not kit.full and case.name.startswith(_SLOW_FIELD_CASES):
            continue
        result = check_field_case(case, run, kit.device)
        if result.status != "unsupported":
            found = True
            yield Finding(case.name, result.message, result.share)
    if not found:
        raise NotClaimed("the backend claims no field case")


CHECKS: tuple[Check, ...] = (
    Check("statement", "the statement of capabilities agrees with itself", _statement),
    Check(AVAILABILITY, "probe finds what it needs, and something is claimed", _availability),
    Check("refusals", "calls just outside a claim are refused, for that reason", _refusals),
    *(Check(family.name, family.promise, _family(family)) for family in FAMILIES),
    Check(
        "results",
        "results have the promised shape, dtype, device and strides",
        _observed(lambda item: item.form, "{}"),
    ),
    Check(
        "inputs",
        "inputs, and the forward's results in the backward, are only read",
        _observed(lambda item: item.written, "written to: {}"),
    ),
    Check(
        "canaries",
        "memory around the inputs is not written",
        _observed(lambda item: item.overrun, "written beside: {}"),
    ),
    Check(
        "aliasing",
        "results do not lie in the inputs' memory",
        _observed(lambda item: item.shared, "shares memory: {}"),
    ),
    Check("unwritten", "no result depends on memory that was not written", _unwritten),
    Check("pairing", "the backward works with any backend's output and lse", _pairing),
    Check("continued", "packed documents may have begun before row 0", _continued),
    Check("determinism", f"{RUNS} deterministic runs are equal in every bit", _determinism),
    Check("attention", "attention() runs it in every layout and has receipts", _attention),
    Check("operators", "the operators pass torch.library.opcheck on it", _operators),
    Check("sync", "nothing waits for the device", _sync),
    Check("field_cases", "faults that others shipped are not its own", _field_cases),
    *(Check(*check) for check in OPERATION_CHECKS),
)
