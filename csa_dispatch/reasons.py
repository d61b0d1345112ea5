"""Reasons: why a backend, a plan or a call does not fit, with what would."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """One constraint that a call does not meet.

    Attributes:
        field: the CallSpec field (or "availability", or a predicate's name) that fails.
        actual: the call's value.
        required: what the backend needs.
        remedy: what the caller can do about it.
    """

    field: str
    actual: str
    required: str
    remedy: str

    def __str__(self) -> str:
        # What is or is not installed needs no field name to be understood.
        subject = "" if self.field == "availability" else f"{self.field} is "
        text = f"{subject}{self.actual}; needs {self.required}"
        return f"{text}; {self.remedy}" if self.remedy else text


class BackendRefused(RuntimeError):
    """A forced backend or a plan cannot run a call, or nothing can.

    Attributes:
        reasons: backend name to its Reasons, in the order they were considered.
    """

    def __init__(self, message: str, reasons: dict[str, tuple[Reason, ...]]) -> None:
        self.reasons = reasons
        lines = [message]
        for name, items in reasons.items():
            lines += [f"  {name}: {reason}" for reason in items]
        super().__init__("\n".join(lines))

    def __reduce__(self):
        return _rebuild, (str(self.args[0]).split("\n", 1)[0], self.reasons)


def _rebuild(message: str, reasons: dict[str, tuple[Reason, ...]]) -> BackendRefused:
    return BackendRefused(message, reasons)
