"""What the machine can do at all: matrix product and copy rates, measured in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .suite import Effort
from .timing import Run, clock_for, spread, time_interleaved

_SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices that are multiplied."""

_COPIED = {"cuda": 2**30, "cpu": 2**27}
"""Bytes that are copied, several times any cache."""

_EFFORT = Effort(rounds=3, seconds=0.2, flush_l2=False)


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one device.

    Attributes:
        matmul: FLOP/s of a square matrix product of random data, by dtype name.
        copy: bytes per second of a copy within the device's memory, read plus written.
    """

    matmul: Mapping[str, float]
    copy: float


def measure_ceilings(device: torch.device, dtypes: Iterable[str]) -> Ceilings:
    """Measure a device's ceilings, medians of warm runs."""
    return Ceilings({name: _matmul(device, name) for name in sorted(set(dtypes))}, _copy(device))


def _copy(device: torch.device) -> float:
    """Bytes per second of a copy."""
    source = torch.arange(_COPIED[device.type] // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _matmul(device: torch.device, dtype: str) -> float:
    """FLOP/s of a matrix product of random data."""
    side = _SIDE[device.type]
    left, right, product = (
        torch.empty(side, side, dtype=getattr(torch, dtype), device=device).normal_()
        for _ in range(3)
    )
    return 2 * side**3 / _seconds(lambda: torch.matmul(left, right, out=product), device)


def _seconds(run: Run, device: torch.device) -> float:
    """Median time of warm runs."""
    samples = time_interleaved({"run": run}, clock_for(device, flush_l2=False), _EFFORT)["run"]
    return spread([sample.elapsed for sample in samples]).median / 1e3
