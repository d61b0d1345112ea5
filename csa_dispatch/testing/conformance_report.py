"""What a conformance run found: one result a named check, for people and machines."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

PASS, FAIL, UNSUPPORTED = "pass", "fail", "unsupported"

_SHOWN_FAULTS = 3
"""Faults of one check that its message spells out."""


class ConformanceError(AssertionError):
    """A backend does not keep the plug-in contract; the message is the report's failures."""


class Finding(NamedTuple):
    """What one call, or one look at the backend, showed.

    Attributes:
        what: the call or thing looked at.
        message: what is wrong, empty when nothing is.
        share: share of the error budget used; None when nothing was compared.
    """

    what: str
    message: str = ""
    share: float | None = None


@dataclass(frozen=True)
class CheckResult:
    """How one named check ended.

    Attributes:
        name: the check's.
        promise: what it holds the backend to.
        status: "pass", "fail", or "unsupported" when the backend does not claim what is checked.
        message: what is wrong, or why unsupported; empty for a pass.
        share: the largest share of error budget used; None when nothing was compared.
        findings: how many calls or things were looked at.
        seconds: wall time, references included.
    """

    name: str
    promise: str
    status: str
    message: str = ""
    share: float | None = None
    findings: int = 0
    seconds: float = 0.0


def summarise(
    name: str, promise: str, findings: list[Finding], seconds: float = 0.0
) -> CheckResult:
    """The result of a check that found something to look at."""
    faults = [f"{item.what}: {item.message}" for item in findings if item.message]
    shown = faults[:_SHOWN_FAULTS]
    if len(faults) > _SHOWN_FAULTS:
        shown.append(f"and {len(faults) - _SHOWN_FAULTS} more of {len(findings)}")
    shares = [item.share for item in findings if item.share is not None]
    return CheckResult(
        name,
        promise,
        FAIL if faults else PASS,
        "\n".join(shown),
        max(shares, default=None),
        len(findings),
        seconds,
    )


@dataclass(frozen=True)
class ConformanceReport:
    """Every check of one backend on one device.

    Attributes:
        backend: its name.
        version: what its probe says it is.
        device: "cpu" or "cuda".
        level: "quick" or "full".
        checks: in the order they ran.
    """

    backend: str
    version: str
    device: str
    level: str
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        return [check for check in self.checks if check.status == FAIL]

    def raise_if_failed(self) -> None:
        """Raise what failed, if anything did.

        Raises:
            ConformanceError: names every failed check with its message.
        """
        if self.failures:
            lines = [f"{self.backend} fails {len(self.failures)} conformance checks:"]
            for check in self.failures:
                lines += [f"{check.name}: {check.promise}", textwrap.indent(check.message, "  ")]
            raise ConformanceError("\n".join(lines))

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-ready data; an infinite share (wrong beyond measure) is None."""
        checks = []
        for check in self.checks:
            share = check.share
            finite = share is not None and math.isfinite(share)
            checks.append({**check.__dict__, "share": share if finite else None})
        return {
            "backend": self.backend,
            "version": self.version,
            "device": self.device,
            "level": self.level,
            "passed": self.passed,
            "checks": checks,
        }

    def __str__(self) -> str:
        counts = {
            status: sum(check.status == status for check in self.checks)
            for status in (PASS, FAIL, UNSUPPORTED)
        }
        total = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        version = f" ({self.version})" if self.version else ""
        lines = [f"{self.backend}{version} on {self.device}, {self.level}: {total}"]
        for check in self.checks:
            share = "" if check.share is None else _share_text(check.share)
            lines.append(f"  {check.status:<11}  {check.name:<17} {share:>6}  {check.promise}")
            if check.message:
                lines.append(textwrap.indent(check.message, " " * 6))
        return "\n".join(lines)


def _share_text(share: float) -> str:
    if not math.isfinite(share):
        return "wrong"
    return f"{share:.0%}" if share < 10 else f"{share:.3g}x"
