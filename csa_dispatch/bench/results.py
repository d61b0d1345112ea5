"""What a benchmark run found: one row a case, direction and backend, judged by its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from csa_dispatch.parity.results import Status
from csa_dispatch.reasons import Reason
from csa_dispatch.testing.budgets import TensorVerdict
from csa_dispatch.wording import quoted

from .counts import Work
from .machine import Ceilings
from .suite import BenchCase, Effort
from .timing import Sample, Spread, spread

MIB = 2**20


@dataclass(frozen=True)
class BenchRow:
    """One backend on one direction of one case.

    Attributes:
        status: PASS when it ran, its sampled rows were right and it was timed.
        reasons: why a backend refused.
        message: what went wrong, empty otherwise.
        samples: the timed runs.
        first_seconds: of the first call, compilation included.
        extra_bytes: peak memory beyond inputs and results; None when not measured.
        work: what the call has to do.
        verdicts: sampled rows against the oracle.
    """

    case: BenchCase
    direction: str
    backend: str
    status: Status
    work: Work | None = None
    reasons: tuple[Reason, ...] = ()
    message: str = ""
    samples: tuple[Sample, ...] = ()
    first_seconds: float = 0.0
    extra_bytes: int | None = None
    verdicts: tuple[TensorVerdict, ...] = ()

    @property
    def key(self) -> str:
        """What ``--filter`` looks at."""
        return f"{self.case.name}/{self.direction}"

    @property
    def time(self) -> Spread | None:
        """Spread of the device's times in milliseconds; None when it was not timed."""
        return spread([sample.elapsed for sample in self.samples]) if self.samples else None

    @property
    def host(self) -> Spread | None:
        """Spread of the times until the call returned to Python, in milliseconds."""
        return spread([sample.host for sample in self.samples]) if self.samples else None

    @property
    def nominal_rate(self) -> float | None:
        """FLOP/s by the nominal count, at the median."""
        return self._rate(0 if self.work is None else self.work.nominal_flops)

    @property
    def used_rate(self) -> float | None:
        """FLOP/s over really visible pairs, at the median."""
        return self._rate(0 if self.work is None else self.work.used_flops)

    @property
    def byte_rate(self) -> float | None:
        """Least bytes over the median, in bytes per second."""
        return self._rate(0 if self.work is None else self.work.bytes)

    @property
    def per_token(self) -> float | None:
        """Median milliseconds per query token."""
        time = self.time
        return None if time is None else time.median / (self.case.batch * self.case.tokens)

    def _rate(self, amount: float) -> float | None:
        time = self.time
        return None if time is None else amount / (time.median / 1e3)


class Shares(NamedTuple):
    """Rates over the machine's measured ceilings; None when one of the two is missing.

    Attributes:
        matmul: really visible pairs' FLOP/s over the matrix product's at that dtype.
        copy: least bytes' rate over the copy's.
    """

    matmul: float | None
    copy: float | None


@dataclass(frozen=True)
class Judgement:
    """A row against its case's limits.

    Attributes:
        must_ms, goal_ms: what its median was held against; None where nothing was asked.
        missed: every limit that was missed, in words.
        unjudged: every limit that the run has nothing to judge by, in words.
        reaches_goal: None without a goal.
    """

    must_ms: float | None
    goal_ms: float | None
    missed: tuple[str, ...]
    unjudged: tuple[str, ...]
    reaches_goal: bool | None

    @property
    def word(self) -> str:
        """``goal``, ``must``, ``missed`` or empty when nothing was asked."""
        if self.missed:
            return "missed"
        if self.reaches_goal:
            return "goal"
        return "must" if self.must_ms is not None else ""


@dataclass(frozen=True)
class BenchRun:
    """A whole run; ``complete`` is False in a report of a run that is still going on."""

    suite: str
    path: str
    summary: str
    device: str
    backends: tuple[str, ...]
    rows: tuple[BenchRow, ...]
    ceilings: Ceilings
    effort: Effort
    environment: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = True

    @property
    def failures(self) -> list[BenchRow]:
        return [row for row in self.rows if row.status is Status.FAIL]

    @property
    def exit_code(self) -> int:
        """1 when a backend failed, 2 when nothing was timed, else 0, limits missed or not."""
        if self.failures:
            return 1
        return 2 if self.fault else 0

    @property
    def fault(self) -> str:
        """Why a complete run timed nothing at all, in one line; empty when it timed something."""
        if not self.complete or any(row.samples for row in self.rows):
            return ""
        row = (self.failures or self.rows)[0]
        why = row.message or "; ".join(map(str, row.reasons))
        return f"nothing was timed: {row.case.name}, {row.direction}, {row.backend}: {why}"

    def judge(self, row: BenchRow) -> Judgement:
        """Hold a row against its case's limits."""
        limits, direction = row.case.limits, row.direction
        must, goal = limits.must_ms.get(direction), limits.goal_ms.get(direction)
        missed: list[str] = []
        unjudged: list[str] = []
        if limits.must_like:
            peers = self._peers(row)
            like = next((peer for peer in peers if peer.case.name == limits.must_like), None)
            if like is None or like.time is None:
                text = f"the run has no time of {quoted(limits.must_like)}"
                unjudged.append(f"must_like: {text}; time that case too")
            else:
                must = like.time.median if must is None else min(must, like.time.median)
        time = row.time
        if time is None:
            return Judgement(must, goal, (), (), None)
        if must is not None and time.median > must:
            missed.append(f"takes {time.median:.4g} ms, must {must:.4g}")
        most = limits.must_extra_mib.get(direction)
        if most is not None and row.extra_bytes is not None and row.extra_bytes > most * MIB:
            missed.append(f"takes {row.extra_bytes / MIB:.0f} MiB extra, must {most:g}")
        growth = self.growth(row)
        if limits.must_growth is not None and len(self._series(row)) < 2:
            text = f"the run has no time of {quoted(row.case.series)} at another T"
            unjudged.append(f"must_growth: {text}; time more of them")
        elif growth is not None and limits.must_growth is not None and growth > limits.must_growth:
            missed.append(f"takes {growth:.3g}x the time per token, must {limits.must_growth:g}x")
        reaches_goal = None if goal is None else time.median <= goal
        return Judgement(must, goal, tuple(missed), tuple(unjudged), reaches_goal)

    def shares(self, row: BenchRow) -> Shares:
        """A row's rates as shares of the machine's ceilings."""
        matmul, copy = self.ceilings.matmul.get(row.case.dtype), self.ceilings.copy
        flops, byte_rate = row.used_rate, row.byte_rate
        return Shares(
            flops / matmul if flops is not None and matmul else None,
            byte_rate / copy if byte_rate is not None and copy else None,
        )

    def growth(self, row: BenchRow) -> float | None:
        """Time per token relative to the series' shortest timed call; None outside a series."""
        if row.case.name == row.case.series:
            return None
        shortest = min(self._series(row), key=lambda peer: peer.case.tokens, default=None)
        if shortest is None or not shortest.per_token or row.per_token is None:
            return None
        return row.per_token / shortest.per_token

    def _series(self, row: BenchRow) -> list[BenchRow]:
        """Peers that differ in ``tokens`` alone."""
        return [peer for peer in self._peers(row) if peer.case.series == row.case.series]

    def _peers(self, row: BenchRow) -> list[BenchRow]:
        """Timed rows of the same backend and direction, of every case."""
        alike = [peer for peer in self.rows if peer.backend == row.backend and peer.samples]
        return [peer for peer in alike if peer.direction == row.direction]
