"""Timing calls side by side: interleaved rounds, so that what drifts hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from .suite import Effort

Run = Callable[[], object]
"""Does the work that is timed; its result is dropped."""

FLUSH_BYTES = 256 * 2**20
"""Overwritten before a sample: well over the L2 cache of any card so far."""

_WARM_UP_SECONDS = 0.1
_MOST_A_TURN = 30
_LEAST_SAMPLES = 3


class Sample(NamedTuple):
    """One timed run, in milliseconds.

    Attributes:
        elapsed: on the device, gaps between launches included; on the CPU the wall time.
        host: until the call returned to Python; over ``elapsed`` the device waits for launches.
    """

    elapsed: float
    host: float


class Clock(Protocol):
    """Takes samples; they are complete when ``finish`` has returned them."""

    def sample(self, run: Run) -> None: ...

    def finish(self) -> list[Sample]:
        """All samples since the last ``finish``, in order."""
        ...


class CpuClock:
    """Wall time by ``perf_counter``."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def sample(self, run: Run) -> None:
        start = time.perf_counter()
        run()
        elapsed = (time.perf_counter() - start) * 1e3
        self._samples.append(Sample(elapsed, elapsed))

    def finish(self) -> list[Sample]:
        samples, self._samples = self._samples, []
        return samples


class CudaClock:
    """CUDA events around each run. Nothing is awaited between samples.

    Args:
        device: whose current stream the runs use.
        flush_l2: overwrite the L2 cache before each sample. While that runs, the host gets ahead
            with its launches, as it does in a model that keeps the device busy.
    """

    def __init__(self, device: torch.device, *, flush_l2: bool) -> None:
        self._device = device
        self._buffer = None
        if flush_l2:
            self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, float]] = []

    def sample(self, run: Run) -> None:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if self._buffer is not None:
            self._buffer.zero_()
        start.record()
        began = time.perf_counter()
        run()
        host = (time.perf_counter() - began) * 1e3
        end.record()
        self._pending.append((start, end, host))

    def finish(self) -> list[Sample]:
        torch.cuda.synchronize(self._device)
        samples = [Sample(start.elapsed_time(end), host) for start, end, host in self._pending]
        self._pending.clear()
        return samples


def clock_for(device: torch.device, *, flush_l2: bool) -> Clock:
    """The clock of a device."""
    return CudaClock(device, flush_l2=flush_l2) if device.type == "cuda" else CpuClock()


def time_interleaved(
    runs: Mapping[str, Run], clock: Clock, effort: Effort
) -> dict[str, list[Sample]]:
    """Warm every run up, then time them in rounds; the order rotates from round to round.

    In each round a run takes as many samples in a row as its share of ``effort.seconds`` holds
    (at most 30). One that is too slow for that takes part in fewer rounds, but at least 3.

    Returns:
        Samples by name.
    """
    plans = {name: _plan(_estimate(run, clock), effort) for name, run in runs.items()}
    names = list(runs)
    taken: list[str] = []
    for turn in range(max(max(plan.rounds for plan in plans.values()), 1) if plans else 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn >= plans[name].rounds:
                continue
            for _ in range(plans[name].samples):
                clock.sample(runs[name])
                taken.append(name)
    found: dict[str, list[Sample]] = {name: [] for name in names}
    for name, sample in zip(taken, clock.finish(), strict=True):
        found[name].append(sample)
    return found


class _Plan(NamedTuple):
    rounds: int
    samples: int


def _plan(estimate: float, effort: Effort) -> _Plan:
    """Rounds, and samples in each, for a run that takes ``estimate`` seconds."""
    affordable = effort.seconds / max(estimate, 1e-9)
    samples = min(_MOST_A_TURN, max(1, int(affordable / effort.rounds)))
    rounds = min(effort.rounds, max(_LEAST_SAMPLES, int(affordable)))
    return _Plan(rounds, samples)


def _estimate(run: Run, clock: Clock) -> float:
    """Seconds a warm run takes; warms it up."""
    deadline = time.perf_counter() + _WARM_UP_SECONDS
    times: list[float] = []
    while not times or time.perf_counter() < deadline:
        clock.sample(run)
        times += [sample.elapsed for sample in clock.finish()]
    return min(times) / 1e3


class Spread(NamedTuple):
    """Quartiles of some values: ``iqr`` is the distance between the first and the third."""

    median: float
    iqr: float
    least: float


def spread(values: Sequence[float]) -> Spread:
    """Median, interquartile range (inclusive method) and least of at least one value."""
    if len(values) == 1:
        return Spread(values[0], 0.0, values[0])
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, third - first, min(values))
