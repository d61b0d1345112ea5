"""Measuring one case: every backend that can run it, side by side on the same data."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.backend import Backend
from csa_dispatch.call import Gradients
from csa_dispatch.call_spec import spec_of
from csa_dispatch.parity.execute import refused
from csa_dispatch.parity.results import Status
from csa_dispatch.reasons import BackendRefused, Reason
from csa_dispatch.registry import backends as known_backends
from csa_dispatch.testing.budgets import gradient_tensors

from .counts import count_pairs, work_of
from .inputs import build_inputs
from .memory import extra_memory
from .modes import deterministic, poisoned_memory
from .results import BenchRow
from .sampled import SampledRows, not_finite
from .suite import BenchCase, Effort
from .timing import Clock, time_interleaved

NOTHING = (False, False, False, False)


class Bench(NamedTuple):
    """Where and how long to measure."""

    device: torch.device
    clock: Clock
    effort: Effort


class Result(NamedTuple):
    """What one direction computed: a forward's results, gradients, or both."""

    output: Tensor | None = None
    lse: Tensor | None = None
    gradients: Gradients | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """Every tensor by its name in verdicts."""
        named = {"output": self.output, "lse": self.lse}
        return named if self.gradients is None else named | gradient_tensors(self.gradients)


Run = Callable[[], Result]


def measure_case(case: BenchCase, names: Sequence[str], bench: Bench) -> list[BenchRow]:
    """Rows of one case: each of its directions on each of the backends ``names``."""
    try:
        measured = _CaseBench(case, names, bench)
    except RuntimeError as error:  # out of memory, above all
        return [
            BenchRow(case, direction, name, Status.FAIL, message=_told(error))
            for direction in case.directions
            for name in names
        ]
    return [row for direction in case.directions for row in measured.rows(direction)]


class _CaseBench:
    """A case's data and what its rows share, made when first needed."""

    def __init__(self, case: BenchCase, names: Sequence[str], bench: Bench) -> None:
        self._case, self._names, self._bench = case, names, bench
        self._inputs = build_inputs(case, bench.device)
        self._pairs = count_pairs(self._inputs.call)
        call = self._inputs.call
        has_pool, has_sink = call.sparse_kv is not None, call.attention_sink is not None
        self._needs = (True, True, has_pool, has_sink)

    @cached_property
    def _sampled(self) -> SampledRows:
        # cuBLAS, which the oracle uses, refuses deterministic mode without a setting of its own.
        with deterministic(False):
            return SampledRows(self._inputs, gradients=set(self._case.directions) != {"forward"})

    @cached_property
    def _upstream(self) -> tuple[Tensor, Tensor]:
        """The forward's results that every backward starts from, of the first that can."""
        refusals: dict[str, tuple[Reason, ...]] = {}
        with deterministic(False):
            for name in dict.fromkeys((*self._names, *known_backends())):
                refusals[name] = self._reasons(name, "forward")
                if not refusals[name]:
                    return _backend(name).forward(self._inputs.call)
        raise BackendRefused("no backend can run the forward of this case.", refusals)

    def rows(self, direction: str) -> list[BenchRow]:
        """One row a backend."""
        with deterministic(self._case.deterministic):
            return self._rows(direction)

    def _rows(self, direction: str) -> list[BenchRow]:
        work = work_of(self._inputs.call, self._pairs, direction)
        rows: dict[str, BenchRow] = {}
        runs: dict[str, Run] = {}
        for name in self._names:
            row = BenchRow(self._case, direction, name, Status.PASS, work)
            reasons = self._reasons(name, direction)
            if reasons:
                rows[name] = replace(row, status=refused(reasons), reasons=reasons)
                continue
            try:
                runs[name] = self._run(_backend(name), direction)
                rows[name] = self._checked(row, runs[name])
            except Exception as error:
                rows[name] = replace(row, status=Status.FAIL, message=_told(error))
        timed = {name: run for name, run in runs.items() if rows[name].status is Status.PASS}
        try:
            samples = time_interleaved(timed, self._bench.clock, self._bench.effort)
        except Exception as error:
            text = f"while timed: {_told(error)}"
            changes = {name: {"status": Status.FAIL, "message": text} for name in timed}
        else:
            changes = {name: {"samples": tuple(samples[name])} for name in timed}
        return [replace(row, **changes.get(name, {})) for name, row in rows.items()]

    def _reasons(self, name: str, direction: str) -> tuple[Reason, ...]:
        """Why a backend cannot run a direction of the case."""
        row = known_backends()[name]
        if row.backend is None or row.availability.reason is not None:
            assert row.availability.reason is not None
            return (row.availability.reason,)
        found: list[Reason] = []
        call = self._inputs.call
        if direction != "backward":
            needs = NOTHING if direction == "forward" else self._needs
            found += row.backend.forward_capabilities.reasons(spec_of(call, needs))
        if direction != "forward":
            claim = row.backend.backward_capabilities
            if claim is None:
                needed, remedy = "no gradients: it has no backward", "Time its forward."
                found.append(Reason("needs_grad", "True", needed, remedy))
            else:
                found += claim.reasons(spec_of(call, self._needs))
        return tuple(dict.fromkeys(found))

    def _run(self, backend: Backend, direction: str) -> Run:
        """What is timed: exactly the backend's own calls."""
        call, grad_output = self._inputs

        def forward() -> Result:
            return Result(*backend.forward(call))

        if direction == "forward":
            return forward
        if direction == "both":

            def both() -> Result:
                output, lse = backend.forward(call)
                gradients = backend.backward(call, output, lse, grad_output, self._needs)
                return Result(output, lse, gradients)

            return both
        output, lse = self._upstream

        def backward() -> Result:
            return Result(gradients=backend.backward(call, output, lse, grad_output, self._needs))

        return backward

    def _checked(self, row: BenchRow, run: Run) -> BenchRow:
        """``row`` after a first run on poisoned memory, and its extra memory if that was right."""
        device = self._bench.device
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations without a deterministic form
            started = time.perf_counter()
            result = run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
        verdicts = self._sampled.verdicts(result.tensors())
        faults = [f"{item.name}: {item.message}" for item in verdicts if not item.passed]
        tensors = result.tensors()
        tensors["lse"] = None  # -inf where a row sees nothing; its sampled rows are judged
        faults += not_finite(tensors)
        del result, tensors
        row = replace(row, first_seconds=seconds, verdicts=tuple(verdicts))
        if faults:
            return replace(row, status=Status.FAIL, message="; ".join(faults))

        def results() -> Iterable[Tensor | None]:
            return run().tensors().values()

        return replace(row, extra_bytes=extra_memory(results, device))


def _backend(name: str) -> Backend:
    backend = known_backends()[name].backend
    assert backend is not None
    return backend


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"
