"""A run: every backend side by side, and no fault of a backend's ends it or is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from csa_dispatch import Backend, Call, Capabilities, Gradients
from csa_dispatch.bench import BenchRow, BenchRun, Suite, run_suite
from csa_dispatch.bench.report_json import run_data
from csa_dispatch.bench.results import MIB
from csa_dispatch.bench.suite import parse_suite
from csa_dispatch.bench.table import render
from csa_dispatch.bench.timing import Sample
from csa_dispatch.capabilities import Between
from csa_dispatch.parity.results import Status
from csa_dispatch.reasons import Reason
from csa_dispatch.testing import Mutation, PlainBackend

Register = Callable[[Backend], Backend]
QUICK = {"rounds": 2, "seconds": 0.01}


class Unwritten(PlainBackend):
    """Leaves the last row of its output as it found the memory."""

    name = "unwritten"

    def __init__(self) -> None:
        super().__init__(Mutation(self.name))

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        whole, lse = super().forward(call)
        output = torch.empty_like(whole)
        output[..., 1, :] = whole[..., 1, :]
        return output, lse


class Raises(PlainBackend):
    """Cannot do what it claims."""

    name = "raises"

    def __init__(self) -> None:
        super().__init__(Mutation(self.name))

    def backward(self, *_: object) -> Gradients:  # pyright: ignore
        raise RuntimeError("no such\nkernel")


class ForwardOnly(Backend):
    """Small heads only, and no gradients."""

    name = "forward_only"
    forward_capabilities = Capabilities(head_dim=Between(1, 16))

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return PlainBackend().forward(call)


def suite_of(*cases: dict[str, Any]) -> Suite:
    base = {"heads": 2, "head_dim": 16, "tokens": 24, "slots": 4, "window": 4, "dtype": "float32"}
    listed = [{"name": "it"} | case for case in cases]
    data = {"name": "mine", "effort": QUICK, "base": base, "case": listed}
    return parse_suite(data, "mine.toml")


def by_key(run: BenchRun) -> dict[tuple[str, str, str], BenchRow]:
    return {(row.case.name, row.direction, row.backend): row for row in run.rows}


@pytest.fixture(scope="module")
def eager_run() -> BenchRun:
    suite = suite_of(
        {"directions": ["forward", "backward", "both"], "deterministic": True},
        {"name": "window", "kind": "window"},
        {"name": "dense", "kind": "dense-compressed"},
        {"name": "sweep", "tokens": [16, 32]},
    )
    return run_suite(suite, backends=["eager"])


def test_every_direction_of_every_case_is_timed(eager_run: BenchRun) -> None:
    assert eager_run.complete
    assert eager_run.exit_code == 0
    assert [(row.case.name, row.direction) for row in eager_run.rows] == [
        ("it", "forward"),
        ("it", "backward"),
        ("it", "both"),
        *((name, way) for name in ("window", "dense") for way in ("forward", "backward")),
        *((f"sweep T={t}", way) for t in (16, 32) for way in ("forward", "backward")),
    ]
    for row in eager_run.rows:
        assert row.status is Status.PASS
        assert len(row.samples) >= 2
        assert row.extra_bytes is not None
        assert row.extra_bytes > 0
        assert row.nominal_rate is not None
        assert row.used_rate is not None
        assert 0 < row.used_rate <= row.nominal_rate
        assert row.verdicts
    assert not torch.are_deterministic_algorithms_enabled()


def test_shares_are_of_ceilings_measured_in_the_run(eager_run: BenchRun) -> None:
    assert set(eager_run.ceilings.matmul) == {"float32"}
    row = eager_run.rows[0]
    shares = eager_run.shares(row)
    assert row.used_rate is not None
    assert row.byte_rate is not None
    assert shares.matmul == row.used_rate / eager_run.ceilings.matmul["float32"]
    assert shares.copy == row.byte_rate / eager_run.ceilings.copy


def test_a_refusal_is_a_row_with_its_reasons(registered: Register) -> None:
    registered(ForwardOnly())
    run = run_suite(suite_of({}, {"name": "wide", "head_dim": 32}), backends=["forward_only"])
    rows = by_key(run)
    assert rows["it", "forward", "forward_only"].samples
    wide = rows["wide", "forward", "forward_only"]
    assert (wide.status, [reason.field for reason in wide.reasons]) == (
        Status.UNSUPPORTED,
        ["head_dim"],
    )
    backward = rows["it", "backward", "forward_only"]
    assert [reason.field for reason in backward.reasons] == ["needs_grad"]
    assert run.exit_code == 0


def test_faults_are_rows_and_the_others_go_on(registered: Register) -> None:
    names = [registered(backend).name for backend in (Raises(), Unwritten())]
    scaled = Mutation("scaled", results=lambda call, output, lse: (output * 1.01, lse))
    names.append(registered(PlainBackend(scaled)).name)
    run = run_suite(suite_of({}), backends=[*names, "eager"])
    rows = by_key(run)
    assert rows["it", "forward", "raises"].samples
    assert rows["it", "backward", "raises"].message == "RuntimeError: no such kernel"
    for name in ("unwritten", "scaled"):
        row = rows["it", "forward", name]
        assert row.status is Status.FAIL
        assert "output" in row.message
        assert not row.samples
    assert "NaN or Inf" in rows["it", "forward", "unwritten"].message
    assert rows["it", "forward", "eager"].samples
    assert rows["it", "backward", "eager"].samples
    assert run.exit_code == 1


def test_a_backward_alone_starts_from_another_backends_forward(registered: Register) -> None:
    backend = PlainBackend(Mutation("backward_only"))
    backend.forward_capabilities = Capabilities(head_dim=Between(1, 8))
    registered(backend)
    rows = by_key(run_suite(suite_of({}), backends=["backward_only"]))
    assert rows["it", "forward", "backward_only"].reasons
    assert rows["it", "backward", "backward_only"].samples


def test_filter_and_directions_choose(eager_run: BenchRun) -> None:
    suite = suite_of({}, {"name": "Other"})
    run = run_suite(suite, backends=["eager"], text="OTHER", directions=["backward"])
    assert [(row.case.name, row.direction) for row in run.rows] == [("Other", "backward")]
    with pytest.raises(ValueError, match=r"mine\.toml: no case to run \(filter 'nothing'\)"):
        run_suite(suite, backends=["eager"], text="nothing")
    with pytest.raises(ValueError, match=r"mine\.toml: no case to run \(direction both\); choose"):
        run_suite(suite, backends=["eager"], directions=["both"])
    with pytest.raises(ValueError, match=r"\(filter 'it'; direction both\)"):
        run_suite(suite, backends=["eager"], text="it", directions=["both"])


def test_the_listener_sees_the_run_grow() -> None:
    seen: list[tuple[int, bool, str]] = []
    run_suite(
        suite_of({}, {"name": "next"}),
        backends=["eager"],
        directions=["forward"],
        listener=lambda run, coming: seen.append((len(run.rows), run.complete, coming)),
    )
    assert seen == [
        (0, False, "the machine's ceilings"),
        (0, False, "it"),
        (1, False, "next"),
        (2, True, ""),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here_is_an_error() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        run_suite(suite_of({}), device="cuda")


def timed(row: BenchRow, milliseconds: float, extra: int = 0) -> BenchRow:
    return replace(row, samples=(Sample(milliseconds, 0.0),), extra_bytes=extra)


@pytest.mark.parametrize(
    ("milliseconds", "extra", "word", "missed"),
    [
        (1.0, 0, "goal", ()),
        (1.5, 0, "must", ()),
        (2.5, 0, "missed", ("takes 2.5 ms, must 2",)),
        (1.0, 9 * MIB, "missed", ("takes 9 MiB extra, must 8",)),
    ],
)
def test_times_and_memory_are_judged(
    eager_run: BenchRun, milliseconds: float, extra: int, word: str, missed: tuple[str, ...]
) -> None:
    suite = suite_of(
        {
            "must_ms": {"forward": 2},
            "goal_ms": {"forward": 1},
            "must_extra_mib": {"forward": 8},
        }
    )
    row = timed(replace(eager_run.rows[0], case=suite.cases[0]), milliseconds, extra)
    judgement = replace(eager_run, rows=(row,)).judge(row)
    assert (judgement.word, judgement.missed) == (word, missed)


def test_a_case_is_held_against_the_one_it_must_be_like(eager_run: BenchRun) -> None:
    cases = suite_of({}, {"name": "part", "must_like": "it"}).cases
    whole, part = (timed(replace(eager_run.rows[0], case=case), 2.0) for case in cases)
    slow = timed(part, 2.5)
    run = replace(eager_run, rows=(whole, part))
    assert run.judge(part).word == "must"
    assert run.judge(slow).missed == ("takes 2.5 ms, must 2",)
    assert run.judge(replace(slow, backend="another")).word == ""
    assert run.judge(whole).word == ""


def test_what_a_case_must_be_like_can_be_missing_and_that_is_said(eager_run: BenchRun) -> None:
    cases = suite_of({}, {"name": "part", "must_like": "it", "must_ms": {"forward": 3}}).cases
    whole, part = (timed(replace(eager_run.rows[0], case=case), 2.0) for case in cases)
    assert replace(eager_run, rows=(whole, part)).judge(part).unjudged == ()
    text = "must_like: the run has no time of 'it'; time that case too"
    other_way = replace(whole, direction="backward")
    for rows in ((part,), (replace(whole, samples=()), part), (other_way, part)):
        run = replace(eager_run, rows=rows)
        assert run.judge(part).unjudged == (text,)
        assert run.judge(part).word == "must"
        assert f"not judged: part, forward, eager: {text}" in shown(run)
        assert run_data(run)["rows"][-1]["not_judged"] == [text]  # pyright: ignore


def test_one_length_alone_does_not_grow_and_that_is_said(eager_run: BenchRun) -> None:
    case = suite_of({"tokens": [100, 200], "must_growth": 1.1}).cases[1]
    row = timed(replace(eager_run.rows[0], case=case), 2.0)
    judgement = replace(eager_run, rows=(row,)).judge(row)
    text = "must_growth: the run has no time of 'it' at another T; time more of them"
    assert judgement.unjudged == (text,)


def shown(run: BenchRun) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(run))
    return capture.get()


def test_a_run_without_any_time_says_why(eager_run: BenchRun) -> None:
    reason = Reason("head_dim", "16", "at most 8", "Use eager.")
    refused = replace(eager_run.rows[0], samples=(), status=Status.UNSUPPORTED, reasons=(reason,))
    run = replace(eager_run, rows=(refused,))
    assert run.fault == f"nothing was timed: it, forward, eager: {reason}"
    assert run.exit_code == 2
    assert replace(run, complete=False).exit_code == 0
    failed = replace(refused, status=Status.FAIL, reasons=(), message="RuntimeError: no")
    run = replace(eager_run, rows=(refused, failed))
    assert run.fault == "nothing was timed: it, forward, eager: RuntimeError: no"
    assert run.exit_code == 1
    assert replace(run, rows=(refused, eager_run.rows[0])).exit_code == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_time_per_token_is_held_against_the_shortest_call(
    eager_run: BenchRun, order: tuple[int, ...]
) -> None:
    tokens, times = (100, 200, 400), (1.0, 2.1, 5.0)
    suite = suite_of({"tokens": [tokens[place] for place in order], "must_growth": 1.1})
    listed = [
        timed(replace(eager_run.rows[0], case=case), times[place])
        for case, place in zip(suite.cases, order, strict=True)
    ]
    rows = sorted(listed, key=lambda row: row.case.tokens)
    run = replace(eager_run, rows=tuple(listed))
    growths = [run.growth(row) for row in rows]
    assert growths == [1.0, pytest.approx(1.05), pytest.approx(1.25)]
    assert [run.judge(row).missed for row in rows[:2]] == [(), ()]
    assert not any(run.judge(row).unjudged for row in rows)
    assert run.judge(rows[2]).missed == ("takes 1.25x the time per token, must 1.1x",)
    assert math.isclose(rows[2].per_token or 0, 0.0125)
