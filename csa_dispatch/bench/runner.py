"""Running a suite: each call once checked, its memory measured, then timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from csa_dispatch.parity.environment import environment
from csa_dispatch.registry import backends as known_backends
from csa_dispatch.registry import known_backend
from csa_dispatch.wording import quoted

from .machine import Ceilings, measure_ceilings
from .measure import Bench, measure_case
from .results import BenchRun
from .suite import BenchCase, Suite
from .timing import clock_for

Listener = Callable[[BenchRun, str], None]
"""Called before each case and after the last: the run so far, and what comes next."""


def run_suite(
    suite: Suite,
    *,
    backends: Sequence[str] = (),
    device: str | None = None,
    text: str = "",
    directions: Sequence[str] = (),
    listener: Listener | None = None,
) -> BenchRun:
    """Run every case of ``suite``; what a backend raises is a failed row, and the run goes on.

    Args:
        suite: what to run.
        backends: names; empty takes the suite's, or else every known one.
        device: ``"cpu"`` or ``"cuda"``; None takes the suite's.
        text: only cases whose name contains it, in any case of letters.
        directions: of each case's own, only these; empty takes all of them.
        listener: told of the progress.

    Raises:
        ValueError: an unknown backend, a device that is not here, or nothing to run.
    """
    started = time.perf_counter()
    names = _names(suite, backends)
    device = device or suite.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here; pass --device cpu")
    cases = _cases(suite, text, directions)
    index = torch.cuda.current_device() if device == "cuda" else 0
    place = torch.device(device, index)
    run = BenchRun(
        suite=suite.name,
        path=suite.path,
        summary=suite.summary,
        device=device,
        backends=names,
        rows=(),
        ceilings=Ceilings({}, 0.0),
        effort=suite.effort,
        environment=environment(device, names),
        complete=False,
    )
    tell = listener or (lambda _run, _next: None)
    tell(run, "the machine's ceilings")
    run = replace(run, ceilings=measure_ceilings(place, [case.dtype for case in cases]))
    clock = clock_for(place, flush_l2=suite.effort.flush_l2)
    bench = Bench(place, clock, suite.effort)
    for case in cases:
        tell(run, case.name)
        rows = measure_case(case, names, bench)
        if place.type == "cuda":
            torch.cuda.empty_cache()
        run = replace(run, rows=(*run.rows, *rows), seconds=time.perf_counter() - started)
    run = replace(run, complete=True, seconds=time.perf_counter() - started)
    tell(run, "")
    return run


def _names(suite: Suite, backends: Sequence[str]) -> tuple[str, ...]:
    for name in backends:
        known_backend(name, "--backend")
    for name in suite.backends:
        known_backend(name, f"{suite.path}: backends")
    return tuple(dict.fromkeys(backends or suite.backends or known_backends()))


def _cases(suite: Suite, text: str, directions: Sequence[str]) -> list[BenchCase]:
    found = []
    for case in suite.cases:
        kept = tuple(d for d in case.directions if not directions or d in directions)
        if kept and text.lower() in case.name.lower():
            found.append(replace(case, directions=kept))
    if not found:
        chosen = [f"filter {quoted(text)}"] if text else []
        chosen += [f"direction {', '.join(directions)}"] if directions else []
        raise ValueError(f"{suite.path}: no case to run ({'; '.join(chosen)}); choose more")
    return found
