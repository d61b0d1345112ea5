"""Conformance of the operations beside attention that a backend implements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from csa_dispatch.operations import SPECS
from csa_dispatch.receipts import record_receipts

from .check import bits, deterministic_algorithms, innermost
from .conformance_kit import Kit, NotClaimed, no_sync
from .conformance_report import Finding
from .conformance_statement import notes_fault, stated
from .guards import NanInNewMemory, guard_inputs, shared_memory
from .suites import SUITES, Results, Suite, claimed_cases, directions, reasons_of

RUNS = 10
"""Runs that must be equal in every bit where determinism is claimed."""


def _operations(kit: Kit) -> Iterator[Finding]:
    """Whether every operation states what it supports, and refuses what lies outside."""
    if not kit.backend.operations:
        raise NotClaimed("the backend implements attention alone")
    for name, implementation in kit.backend.operations.items():
        known = name in SPECS and name != "attention"
        yield Finding(name, "" if known else f"is none of {', '.join(SPECS)}")
        if not known:
            continue
        sides = {
            "forward": implementation.forward_capabilities,
            "backward": implementation.backward_capabilities,
        }
        spec = SPECS[name]()
        for side, claims in sides.items():
            if claims is None:
                continue
            yield from stated(f"{name} {side}", claims, spec)
            for field, allowed in claims.bounds().items():
                for value in allowed.outside():
                    changed: Any = spec._replace(**{field: value})
                    refused = field in [reason.field for reason in claims.reasons(changed)]
                    message = "" if refused else "no bound refuses it"
                    yield Finding(f"{name} {side} {field}={value}", message)
        yield Finding(f"{name} notes", notes_fault(implementation.notes(spec)))


def _held_to(operation: str) -> Callable[[Kit], Iterator[Finding]]:
    """The check that runs an operation's cases: by the oracle, guarded, and by receipts."""

    def run(kit: Kit) -> Iterator[Finding]:
        suite, implementation = SUITES[operation], kit.backend.operations.get(operation)
        if implementation is None:
            raise NotClaimed(f"the backend has no {operation}")
        cases = list(claimed_cases(suite, implementation, kit.device.type, kit.capability))
        if not cases:
            raise NotClaimed("the backend claims no such call on this device")
        with kit.registered():
            for case in cases:
                yield _guarded(kit, suite, case)
                yield _forced(kit, suite, case)
        yield from _more(kit, suite, cases)

    return run


def _more(kit: Kit, suite: Suite, cases: list[Any]) -> Iterator[Finding]:
    """Of a few cases: runs repeat bit for bit where that is claimed, and nothing waits."""
    some = cases[:: max(1, len(cases) // 4)]
    for case in some:
        if _claims(kit, suite, case, deterministic=True):
            yield Finding(f"deterministic {case.name}", _repeated(kit, suite, case))
        if kit.device.type == "cuda":
            yield Finding(f"{case.name} waits", _waits(kit, suite, case))


def _claims(kit: Kit, suite: Suite, case: Any, **changes: bool) -> bool:
    spec = case.spec(kit.device.type, kit.capability)._replace(**changes)
    return not reasons_of(kit.backend.operations[suite.operation], spec)


def _guarded(kit: Kit, suite: Suite, case: Any) -> Finding:
    """Run the implementation itself on guarded inputs: judged, and nothing else touched."""
    inputs, guards = _guard(suite.inputs(case, kit.device))
    # Memory is poisoned by a dispatch mode, under which calls are traced.
    poison = NanInNewMemory() if _claims(kit, suite, case, tracing=True) else nullcontext()
    try:
        with poison:
            results = suite.direct(kit.backend.operations[suite.operation], inputs)
    except Exception as error:
        return Finding(case.name, f"{type(error).__name__}: {error} (at {innermost(error)})")
    faults = [f"{name} was written to" for name, guard in guards.items() if guard.modified()]
    faults += [f"wrote beside {name}" for name, guard in guards.items() if guard.overrun()]
    faults += [f"shares memory: {item}" for item in shared_memory(results, guards)]
    faults += [
        f"{name} carries an autograd graph"
        for name, item in results.items()
        if item is not None and item.requires_grad
    ]
    return _judged(case.name, suite, case, results, faults)


def _guard(inputs: Any) -> tuple[Any, dict[str, Any]]:
    """``guard_inputs``, also of a call that lies within the inputs."""
    inputs, guards = guard_inputs(inputs)
    if isinstance(getattr(inputs, "call", None), tuple):
        call, inner = guard_inputs(inputs.call)
        return inputs._replace(call=call), {**guards, **inner}
    return inputs, guards


def _forced(kit: Kit, suite: Suite, case: Any) -> Finding:
    """Call the public function, forced to the backend: judged, with receipts."""
    what = f"forced {case.name}"
    try:
        with record_receipts() as receipts:
            results = suite.forced(kit.backend.name, suite.inputs(case, kit.device))
    except Exception as error:
        return Finding(what, f"{type(error).__name__}: {error} (at {innermost(error)})")
    ran = [(item.direction, item.backend) for item in receipts]
    wanted = [(side, kit.backend.name) for side in directions(case.spec())]
    faults = [] if ran == wanted else [f"receipts are {ran}, must be {wanted}"]
    return _judged(what, suite, case, results, faults)


def _judged(what: str, suite: Suite, case: Any, results: Results, faults: list[str]) -> Finding:
    on_host = {name: item if item is None else item.cpu() for name, item in results.items()}
    verdicts = suite.judge(case, on_host)
    faults += [f"{item.name}: {item.message}" for item in verdicts if item.message]
    return Finding(what, "; ".join(faults), max(item.share for item in verdicts))


def _repeated(kit: Kit, suite: Suite, case: Any) -> str:
    implementation = kit.backend.operations[suite.operation]
    inputs = suite.inputs(case, kit.device)
    with deterministic_algorithms(True):
        runs = [suite.direct(implementation, inputs) for _ in range(RUNS)]
    other = sum(not _equal(runs[0], results) for results in runs[1:])
    return f"{other} of {RUNS} runs differ from the first" if other else ""


def _equal(one: Results, other: Results) -> bool:
    return all(
        (first is None and second is None)
        or (first is not None and second is not None and torch.equal(bits(first), bits(second)))
        for first, second in zip(one.values(), other.values(), strict=True)
    )


def _waits(kit: Kit, suite: Suite, case: Any) -> str:
    """What waits for the device, in a call that has run before."""
    inputs = suite.inputs(case, kit.device)
    torch.cuda.synchronize(kit.device)
    try:
        with no_sync():
            suite.direct(kit.backend.operations[suite.operation], inputs)
    except RuntimeError as error:
        return str(error)
    return ""


OPERATION_CHECKS = (
    (
        "operations",
        "operations beside attention say what they support, and refuse the rest",
        _operations,
    ),
    (
        "lightning_indexer",
        "picks are a best set up to rounding, in range, distinct and padded",
        _held_to("lightning_indexer"),
    ),
    (
        "compress_kv",
        "entries and gradients of the compressor lie within their budgets",
        _held_to("compress_kv"),
    ),
)
"""Name, promise and check of each."""
