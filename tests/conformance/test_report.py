"""The report and the command say what happened, to people and to machines."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from csa_dispatch.cli import app
from csa_dispatch.testing import ConformanceReport, PlainBackend, check_backend
from csa_dispatch.testing.conformance_report import CheckResult, Finding, summarise
from tests.conformance.broken import ClaimsEveryHeadDim, IsNotHere

PASSED = CheckResult("window", "windows are right", "pass", share=0.25, findings=3)
FAILED = CheckResult("nan", "NaN spreads", "fail", "one: two", math.inf, 2)
REPORT = ConformanceReport("mine", "lib 1.0", "cpu", "quick", (PASSED, FAILED))


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["conformance", *arguments], env={"COLUMNS": "200"})


def test_a_check_takes_its_worst_finding_and_spells_out_three_faults():
    findings = [Finding(f"case {n}", "wrong" if n else "", 0.1 * n) for n in range(6)]
    result = summarise("slots", "slots are right", findings)
    assert (result.status, result.findings, result.share) == ("fail", 6, 0.5)
    assert result.message.splitlines() == [
        "case 1: wrong", "case 2: wrong", "case 3: wrong", "and 2 more of 6",
    ]  # fmt: skip


def test_a_report_reads_as_text_and_as_json():
    assert str(REPORT).splitlines() == [
        "mine (lib 1.0) on cpu, quick: 1 pass, 1 fail",
        "  pass         window               25%  windows are right",
        "  fail         nan                wrong  NaN spreads",
        "      one: two",
    ]
    data = json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))
    assert data["passed"] is False
    assert data["checks"][0]["share"] == 0.25
    assert data["checks"][1] == {
        "name": "nan", "promise": "NaN spreads", "status": "fail", "message": "one: two",
        "share": None, "findings": 2, "seconds": 0.0,
    }  # fmt: skip


def test_an_unavailable_backend_fails_and_nothing_else_runs():
    report = check_backend(IsNotHere(), checks=["window", "slots"])
    assert [(check.name, check.status) for check in report.checks] == [
        ("availability", "fail"),
        ("window", "unsupported"),
        ("slots", "unsupported"),
    ]


def test_the_listener_hears_of_every_check():
    heard: list[CheckResult] = []
    report = check_backend(PlainBackend(), checks=["window", "nan"], listener=heard.append)
    assert tuple(heard) == report.checks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "medium"}, "quick or full"),
        ({"checks": ["colour"]}, "colour"),
        ({"device": "gpu"}, "device is gpu, but torch finds none here"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        check_backend(PlainBackend(), **arguments)


def test_only_a_backend_can_be_checked():
    with pytest.raises(TypeError, match="is a str"):
        check_backend("eager")  # pyright: ignore[reportArgumentType]


def test_the_command_prints_the_report():
    result = invoke("eager", "--check", "slots")
    assert result.exit_code == 0, result.output
    assert "on cpu, quick: 2 pass" in result.stdout


def test_the_command_prints_json_alone_and_exits_1_on_a_failure(registered):
    backend = registered(ClaimsEveryHeadDim())
    result = invoke(backend.name, "--check", "head_dim", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["backend"] == backend.name
    assert [check["status"] for check in data["checks"]] == ["pass", "fail"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["eagr"], "Did you mean 'eager'?"),
        (["eager", "--level", "medium"], "quick or full"),
        (["eager", "--check", "colour"], "colour"),
        (["eager", "--device", "tpu"], "not cpu or cuda"),
    ],
)
def test_a_usage_error_exits_2(arguments: list[str], text: str):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())
