"""The JSON report. Its shape is named by ``SCHEMA``; a change that breaks readers raises it.

Times are in milliseconds, rates in FLOP/s and bytes per second, memory in bytes. What was not
measured is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from csa_dispatch.parity.files import write_atomically

from .results import BenchRow, BenchRun
from .suite import BenchCase
from .timing import Spread

SCHEMA = "csa-dispatch.bench/1"


def run_data(run: BenchRun) -> dict[str, object]:
    """The run as JSON-ready data."""
    return {
        "schema": SCHEMA,
        "complete": run.complete,
        "suite": {"name": run.suite, "path": run.path, "summary": run.summary},
        "device": run.device,
        "backends": list(run.backends),
        "environment": dict(run.environment),
        "seconds": round(run.seconds, 3),
        "exit_code": run.exit_code,
        "effort": dataclasses.asdict(run.effort),
        "ceilings": {"matmul": dict(run.ceilings.matmul), "copy": run.ceilings.copy},
        "cases": {case.name: _case(case) for case in _cases(run)},
        "rows": [_row(run, row) for row in run.rows],
    }


def json_text(run: BenchRun) -> str:
    """The run as JSON."""
    return json.dumps(run_data(run), indent=1, allow_nan=False) + "\n"


def write_json(run: BenchRun, path: str | Path) -> None:
    """Write the JSON report atomically."""
    write_atomically(path, json_text(run))


def _cases(run: BenchRun) -> list[BenchCase]:
    return list({row.case.name: row.case for row in run.rows}.values())


def _case(case: BenchCase) -> dict[str, object]:
    data = dataclasses.asdict(case)
    data["kind"] = case.kind.value
    return data


def _spread(value: Spread | None) -> dict[str, float] | None:
    if value is None:
        return None
    return {name: round(number, 6) for name, number in value._asdict().items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row(run: BenchRun, row: BenchRow) -> dict[str, object]:
    judgement = run.judge(row)
    shares = run.shares(row)
    return {
        "case": row.case.name,
        "direction": row.direction,
        "backend": row.backend,
        "status": row.status.value,
        "reasons": [reason._asdict() for reason in row.reasons],
        "message": row.message,
        "time_ms": _spread(row.time),
        "host_ms": _spread(row.host),
        "samples_ms": [round(sample.elapsed, 6) for sample in row.samples],
        "first_call_seconds": round(row.first_seconds, 3) if row.samples else None,
        "extra_bytes": row.extra_bytes,
        "work": None if row.work is None else row.work._asdict(),
        "nominal_flops_per_second": row.nominal_rate,
        "used_flops_per_second": row.used_rate,
        "bytes_per_second": row.byte_rate,
        "share_of_matmul": shares.matmul,
        "share_of_copy": shares.copy,
        "growth_per_token": run.growth(row),
        "must_ms": judgement.must_ms,
        "goal_ms": judgement.goal_ms,
        "verdict": judgement.word or None,
        "missed": list(judgement.missed),
        "not_judged": list(judgement.unjudged),
        "budget_shares": {item.name: _finite(item.share) for item in row.verdicts},
    }
