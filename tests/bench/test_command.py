"""``csa-dispatch bench`` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from csa_dispatch import Backend, Capabilities
from csa_dispatch.bench.report_json import SCHEMA
from csa_dispatch.capabilities import Between
from csa_dispatch.cli import app
from csa_dispatch.testing import Mutation, PlainBackend

SUITE = """
name = "tiny"
device = "cpu"
backends = ["eager"]
[effort]
rounds = 2
seconds = 0.01
[base]
heads = 2
head_dim = 16
slots = 4
window = 4
dtype = "float32"
[[case]]
name = "sweep"
tokens = [16, 32]
must_ms = { forward = 0.0001, backward = 1e6 }
"""


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def told(result: Result) -> str:
    """All of its output without line breaks and frames."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE)
    return path


def test_json_on_standard_output_is_all_there_is(suite: Path) -> None:
    result = bench("--suite", suite, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (data["schema"], data["complete"], data["exit_code"]) == (SCHEMA, True, 0)
    assert {"torch", "date", "command", "device_name"} <= set(data["environment"])
    assert data["ceilings"]["matmul"]["float32"] > 0
    assert [(row["case"], row["direction"]) for row in data["rows"]] == [
        (f"sweep T={tokens}", direction)
        for tokens in (16, 32)
        for direction in ("forward", "backward")
    ]
    for row in data["rows"]:
        assert set(row["time_ms"]) == {"median", "iqr", "least"}
        assert min(row["samples_ms"]) == row["time_ms"]["least"]
        assert row["verdict"] == ("missed" if row["direction"] == "forward" else "must")
    assert data["cases"]["sweep T=16"]["tokens"] == 16


def test_files_are_written_and_the_table_is_shown(suite: Path, tmp_path: Path) -> None:
    report, figure = tmp_path / "new" / "report.json", tmp_path / "figure.png"
    result = bench("--suite", suite, "--report", report, "--png", figure)
    assert result.exit_code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert json.loads(report.read_text())["complete"] is True
    assert "sweep T=32" in result.stdout
    assert "missed: sweep T=16, forward, eager takes" in result.stdout
    assert [path.name for path in report.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "egaer"), "Did you mean 'eager'?"),
        (("--filter", "nothing"), "no case to run (filter 'nothing')"),
        (("--direction", "sideways"), "'sideways' is not one of forward, backward, both"),
        (("--device", "tpu"), "'tpu' is not cpu or cuda"),
        (("--suite", "nowhere.toml"), "nowhere.toml: no such file"),
        (("--direction", "both"), "no case to run (direction both)"),
        (("--report", "-"), "--report is '-'; it must be a file. Pass the name of one."),
        (("--png", "-"), "--png is '-'; it must be a file."),
    ],
)
def test_bad_arguments_exit_2(suite: Path, arguments: tuple[str, str], message: str) -> None:
    result = bench("--suite", suite, *arguments)
    assert result.exit_code == 2
    assert message in told(result)


def test_two_reports_cannot_share_a_file(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    report, figure = tmp_path / "x", tmp_path / "link" / "x"
    result = bench("--suite", suite, "--report", report, "--png", figure)
    assert result.exit_code == 2
    assert "it must be another file than --report's. Pass two names." in told(result)
    assert not report.exists()


@pytest.mark.parametrize("name", ["[red]x[/blue]", "[/]", "$x_ {$", "a\\"])
def test_a_name_is_shown_as_it_is_written(suite: Path, tmp_path: Path, name: str) -> None:
    text = SUITE.replace('"tiny"', f"'{name}'").replace('"sweep"', f"'{name}'")
    suite.write_text(text)
    figure = tmp_path / "figure.png"
    result = bench("--suite", suite, "--png", figure, "--direction", "forward")
    assert (result.exit_code, result.exception) == (0, None)
    assert f"Bench {name} on" in result.stdout
    assert f"{name} T=32" in result.stdout
    assert figure.exists()


@pytest.mark.parametrize("drawn", [False, True])
def test_nothing_timed_is_an_error_with_or_without_a_figure(
    suite: Path, registered: Callable[[Backend], Backend], tmp_path: Path, drawn: bool
) -> None:
    backend = PlainBackend(Mutation("narrow"))
    backend.forward_capabilities = Capabilities(head_dim=Between(1, 8))
    registered(backend)
    report, figure = tmp_path / "report.json", tmp_path / "figure.png"
    arguments = ("--backend", "narrow", "--direction", "forward", "--report", report)
    result = bench("--suite", suite, *arguments, *(("--png", figure) if drawn else ()))
    assert result.exit_code == 2
    assert "error: nothing was timed: sweep T=16, forward, narrow: head_dim" in told(result)
    assert json.loads(report.read_text())["exit_code"] == 2
    assert "0 timed, 2 refused" in result.stdout
    assert not figure.exists()


def test_an_unknown_key_exits_2_with_one_error(suite: Path) -> None:
    suite.write_text(SUITE + "colour = 3\n")
    result = bench("--suite", suite)
    assert result.exit_code == 2
    assert "case[0].colour: is not a known key" in " ".join(result.output.split())
    assert result.output.count("error") == 1


def test_a_wrong_backend_exits_1(
    suite: Path, registered: Callable[[Backend], Backend], tmp_path: Path
) -> None:
    halved = Mutation("halved", results=lambda call, output, lse: (output / 2, lse))
    registered(PlainBackend(halved))
    report = tmp_path / "report.json"
    result = bench(
        "--suite", suite, "--backend", "halved", "--backend", "eager", "--report", report
    )
    assert result.exit_code == 1
    rows = json.loads(report.read_text())["rows"]
    status = {(row["backend"], row["direction"]): row["status"] for row in rows}
    assert status["halved", "forward"] == "fail"
    assert status["eager", "forward"] == "pass"
    assert "failed: sweep T=16, forward, halved: output:" in result.stdout
