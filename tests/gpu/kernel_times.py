"""Which kernels a call's time goes to, by torch's profiler, at the sizes of a bench suite.

    PYTHONPATH=.:backends python tests/gpu/kernel_times.py [--case TEXT] [--trace DIR]

For each case and direction: every kernel's mean microseconds a call, its launches a call, and
"between", what no kernel filled from the first one's start to the last one's end. The L2 cache is
overwritten before each call. ``--trace`` writes a Chrome trace of each.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

import torch
from csa_backend_triton import backend
from torch.profiler import ProfilerActivity, profile

from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.bench.modes import deterministic
from csa_dispatch.bench.suite import BenchCase, load_suite

CALLS = 7
CUDA = torch.device("cuda")


def runs_of(case: BenchCase) -> dict[str, partial[object]]:
    """The backend's own call of each direction."""
    call, grad_output = build_inputs(case, CUDA)
    output, lse = backend.forward(call)
    needs = (True, True, call.sparse_kv is not None, call.attention_sink is not None)
    every = {
        "forward": partial(backend.forward, call),
        "backward": partial(backend.backward, call, output, lse, grad_output, needs),
    }
    return {name: run for name, run in every.items() if name in case.directions}


def kernel_times(run: partial[object], trace: Path | None) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a call, by kernel; medians over calls."""
    filler = torch.empty(1 << 28, dtype=torch.int8, device=CUDA)
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for _ in range(CALLS):
            filler.bitwise_not_()
            run()
        torch.cuda.synchronize()
    if trace is not None:
        session.export_chrome_trace(str(trace))
    events = sorted(session.events() or [], key=lambda event: event.time_range.start)
    calls: list[list[tuple[str, float, float]]] = []
    for event in events:
        span = event.time_range
        if "bitwise_not" in event.name:
            calls.append([])
        elif calls:
            calls[-1].append((event.name, span.start, span.end))
    spent: dict[str, list[float]] = defaultdict(list)
    launches: dict[str, int] = defaultdict(int)
    for call in calls:
        by_name: dict[str, float] = defaultdict(float)
        for name, start, end in call:
            by_name[name] += end - start
            launches[name] += 1
        busy = sum(by_name.values())
        by_name["between"] = max(end for *_, end in call) - call[0][1] - busy
        for name, value in by_name.items():
            spent[name].append(value)
    return {name: (median(values), launches[name] / CALLS) for name, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="h200.toml")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for case in load_suite(options.suite).cases:
        if options.case not in case.name:
            continue
        with deterministic(case.deterministic):
            for direction, run in runs_of(case).items():
                trace = None
                if options.trace is not None:
                    name = f"{case.name} {direction}".replace(" ", "_").replace(",", "")
                    trace = options.trace / f"{name}.json"
                found = kernel_times(run, trace)
                total = sum(value for value, _ in found.values())
                print(f"{case.name} {direction}: {total:.1f} us", flush=True)
                for name, (value, count) in sorted(found.items(), key=lambda item: -item[1][0]):
                    print(f"    {value:8.1f} us {count:5.1f} x {name[:90]}", flush=True)


if __name__ == "__main__":
    main()
