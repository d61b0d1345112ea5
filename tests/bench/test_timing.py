"""Timing is interleaved, and its figures are what they are called."""

from __future__ import annotations

import time
from itertools import groupby

import pytest

from csa_dispatch.bench.suite import Effort
from csa_dispatch.bench.timing import CpuClock, spread, time_interleaved


def test_spread_is_the_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 1.0)
    assert spread([7.0]) == (7.0, 0.0, 7.0)


@pytest.mark.serial
def test_runs_take_turns_and_the_first_changes() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    runs = {"quick": lambda: run("quick", 2e-3), "slow": lambda: run("slow", 0.03)}
    samples = time_interleaved(runs, CpuClock(), Effort(rounds=4, seconds=0.04))
    timed = order[-sum(len(found) for found in samples.values()) :]
    turns = [(name, len(list(group))) for name, group in groupby(timed)]
    # Rounds: quick slow, slow quick, quick slow; in the last one slow has had its share.
    assert [name for name, _ in turns] == ["quick", "slow", "quick", "slow", "quick"]
    assert [count for name, count in turns if name == "slow"] == [2, 1]
    assert len(samples["slow"]) == 3  # of 0.04 s it has time for one; a median needs three
    assert len(samples["quick"]) > 4
    assert all(sample.elapsed >= 30 for sample in samples["slow"])
    assert all(sample.elapsed >= 2 for sample in samples["quick"])


def test_nothing_to_time_is_nothing_timed() -> None:
    assert time_interleaved({}, CpuClock(), Effort()) == {}
