"""The conformance kit: does a backend keep the plug-in contract?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from csa_dispatch.backend import Availability, Backend
from csa_dispatch.validation import fail
from csa_dispatch.wording import a_kind

from .check import innermost
from .conformance_checks import AVAILABILITY, CHECKS, Check
from .conformance_kit import Kit, NotClaimed
from .conformance_report import (
    FAIL,
    UNSUPPORTED,
    CheckResult,
    ConformanceReport,
    Finding,
    summarise,
)
from .conformance_statement import claims_fault

LEVELS = ("quick", "full")
CHECK_NAMES = tuple(check.name for check in CHECKS)


def check_backend(
    backend: Backend,
    device: str | torch.device = "cpu",
    level: str = "quick",
    *,
    checks: Sequence[str] | None = None,
    listener: Callable[[CheckResult], None] | None = None,
) -> ConformanceReport:
    """Run everything that a backend's author needs to know, on calls that the backend claims.

    Results are judged against the float64 oracle within error budgets. Nothing that a backend
    does raises here; it becomes a failed check. A backend that claims no forward on the device
    has its backward checked after eager PyTorch's forward; one that claims no backward there is
    asked for no gradients.

    Args:
        backend: the plug-in object; it need not be registered.
        device: where to run.
        level: "quick" covers each claimed value with small calls, in seconds on a CPU. "full"
            covers each pair of values, at real head counts and head dims, in minutes.
        checks: names of the checks to run besides availability; None for all.
        listener: told of every check as it ends.

    Raises:
        TypeError: ``backend`` is not a ``Backend`` instance, or another argument of a wrong type.
        ValueError: an unknown level or check, or a device that is not here.
    """
    if not isinstance(backend, Backend):
        actual, remedy = a_kind(backend), "Pass an instance of your class."
        fail("backend", actual, "a Backend instance", remedy, TypeError)
    if level not in LEVELS:
        fail("level", repr(level), " or ".join(LEVELS), f"Leave it out for {LEVELS[0]}.")
    if checks is not None and (isinstance(checks, str) or not isinstance(checks, Sequence)):
        remedy = 'Pass ["canaries"], say.'
        fail("checks", repr(checks), "a list of names or None", remedy, TypeError)
    if listener is not None and not callable(listener):
        remedy = "Pass a function of one CheckResult."
        fail("listener", repr(listener), "a function or None", remedy, TypeError)
    wanted = CHECK_NAMES if checks is None else tuple(checks)
    unknown = [name for name in wanted if name not in CHECK_NAMES]
    if unknown:
        required = f"some of {', '.join(CHECK_NAMES)}"
        fail("checks", unknown, required, "Leave it out for all of them.")
    where = _device(device)
    kit = _kit(backend, where, level)
    results: list[CheckResult] = []
    here = True
    for check in CHECKS:
        if check.name not in (AVAILABILITY, *wanted):
            continue
        if isinstance(kit, Kit) and here:
            result = _run(check, kit)
        elif check.name == AVAILABILITY:
            result = summarise(check.name, check.promise, [Finding("claims", str(kit))])
        else:
            result = CheckResult(check.name, check.promise, UNSUPPORTED, "not available")
        here = here and (check.name, result.status) != (AVAILABILITY, FAIL)
        results.append(result)
        if listener is not None:
            listener(result)
    name = getattr(backend, "name", type(backend).__name__)
    return ConformanceReport(name, _version(backend), where.type, level, tuple(results))


def _device(device: str | torch.device) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        fail("device", repr(device), "a torch.device or its name", "Pass 'cpu', say.", TypeError)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        text = f"device is {device}, but torch finds none here. Pass 'cpu', say."
        raise ValueError(text) from error
    return torch.device(device)


def _kit(backend: Backend, device: torch.device, level: str) -> Kit | str:
    """The kit, or why nobody can ask what the backend claims."""
    fault = claims_fault(backend)
    if fault:
        return fault
    try:
        return Kit(backend, device, full=level == "full")
    except Exception as error:
        raised = f"{type(error).__name__}: {error} (at {innermost(error)})"
        return f"asking for calls raises {raised}; a predicate must return a Reason or None"


def _run(check: Check, kit: Kit) -> CheckResult:
    started = time.perf_counter()
    findings: list[Finding] = []
    try:
        for finding in check.run(kit):
            findings.append(finding)
    except NotClaimed as absent:
        return CheckResult(check.name, check.promise, UNSUPPORTED, str(absent))
    except Exception as error:
        message = f"{type(error).__name__}: {error} (at {innermost(error)})"
        findings.append(Finding("the check", message))
    return summarise(check.name, check.promise, findings, time.perf_counter() - started)


def _version(backend: Backend) -> str:
    try:
        found = backend.probe()
    except Exception:
        return ""
    return found.version if isinstance(found, Availability) else ""
