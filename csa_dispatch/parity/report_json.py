"""The JSON report. Its shape is named by ``SCHEMA``; a change that breaks readers raises it.

Numbers that JSON cannot hold (an infinite share, of a wrong NaN mask or shape) are null; the
tensor's ``message`` says why.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from .files import write_atomically
from .results import CellReport, ParityRun, Status, Summary

SCHEMA = "csa-dispatch.parity/1"


def run_data(run: ParityRun) -> dict[str, object]:
    """The run as JSON-ready data."""
    return {
        "schema": SCHEMA,
        "matrix": {"name": run.matrix, "path": run.path, "summary": run.summary},
        "device": run.device,
        "backends": list(run.backends),
        "required": list(run.required),
        "environment": dict(run.environment),
        "seconds": round(run.seconds, 3),
        "exit_code": run.exit_code,
        "counts": _counts(run.counts),
        "groups": dict(run.groups),
        "notes": list(run.notes),
        "faults": list(run.faults),
        "summaries": [_summary(summary) for summary in run.summaries()],
        "cells": [_cell(report) for report in run.reports],
    }


def json_text(run: ParityRun) -> str:
    """The run as JSON."""
    return json.dumps(run_data(run), indent=1, allow_nan=False) + "\n"


def write_json(run: ParityRun, path: str | Path) -> None:
    """Write the JSON report atomically."""
    write_atomically(path, json_text(run))


def _counts(counts: dict[Status, int]) -> dict[str, int]:
    return {status.value: number for status, number in counts.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _summary(summary: Summary) -> dict[str, object]:
    slowest = summary.slowest
    return {
        "entry": str(summary.entry),
        "counts": _counts(dict(summary.counts)),
        "worst": {
            name: {"share": _finite(worst.share), "cell": worst.cell.id}
            for name, worst in summary.worst.items()
        },
        "slowest": None
        if slowest is None
        else {"cell": slowest.cell.id, "seconds": round(slowest.seconds, 6)},
        "seconds": round(summary.seconds, 3),
    }


def _cell(report: CellReport) -> dict[str, object]:
    cell = report.cell
    return {
        "id": cell.id,
        "kind": cell.kind,
        "group": cell.group,
        "name": cell.name,
        "about": cell.about,
        "layout": cell.layout,
        "forward": cell.entry.forward,
        "backward": cell.entry.backward,
        "status": report.status.value,
        "share": _finite(report.share),
        "seconds": round(report.seconds, 6),
        "receipts": list(report.receipts),
        "message": report.message,
        "reasons": [reason._asdict() for reason in report.reasons],
        "tensors": {
            verdict.name: {
                "share": _finite(verdict.share),
                "error": _finite(verdict.error),
                "plain_error": _finite(verdict.plain_error),
                "message": verdict.message,
            }
            for verdict in report.verdicts
        },
    }
