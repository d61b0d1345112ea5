"""Check one boundary: a call just outside a claim must be refused, for the reason claimed."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from csa_dispatch.call_spec import CallSpec
from csa_dispatch.policy import Entry
from csa_dispatch.reasons import BackendRefused, Reason
from csa_dispatch.routing import entry_reasons

from .cases import Case, build
from .check import attend, deterministic_algorithms
from .covering import Boundary


class Refusal(NamedTuple):
    """How a call outside a claim ended.

    Attributes:
        reasons: why routing says it cannot run.
        message: what is wrong with the refusal, empty when it is as it must be.
    """

    reasons: tuple[Reason, ...]
    message: str


def check_boundary(boundary: Boundary, entry: Entry, device: torch.device | str) -> Refusal:
    """Ask for the call: it must be refused with a Reason of the boundary's field.

    Routing is asked about the description; where the call can be built on ``device`` it is also
    made, and must raise. Every gradient is asked for, since the bound may be the backward's.
    """
    spec, case = _differentiable(boundary)
    reasons = entry_reasons(spec, entry, hypothetical=True)
    if boundary.field not in [reason.field for reason in reasons]:
        fields = ", ".join(reason.field for reason in reasons) or "none"
        return Refusal(reasons, f"no Reason of field {boundary.field} (Reasons: {fields})")
    if case is None or spec.device_type != torch.device(device).type:
        return Refusal(reasons, "")
    return Refusal(reasons, _call_is_refused(entry, boundary.field, case, device))


def _differentiable(boundary: Boundary) -> tuple[CallSpec, Case | None]:
    every = (True, True, True, True)
    if boundary.case is None:
        return boundary.spec._replace(needs_grad=every), None
    case = dataclasses.replace(boundary.case, needs_grad=every)
    return boundary.spec._replace(needs_grad=case.needs_grad), case


def _call_is_refused(entry: Entry, field: str, case: Case, device: torch.device | str) -> str:
    """Why the call was not refused as it must be; empty when it was."""
    inputs = build(case, device)
    try:
        with deterministic_algorithms(case.deterministic):
            attend(inputs, backend=entry.forward, backward_backend=entry.backward)
    except BackendRefused as refusal:
        fields = [reason.field for reasons in refusal.reasons.values() for reason in reasons]
        if field in fields or "availability" in fields:
            return ""
        return f"the call was refused without a Reason of field {field}: {refusal}"
    except Exception as error:
        return f"the call raised {type(error).__name__} ({error}), not BackendRefused"
    return "the call ran; it must be refused"
