"""The command: exit codes, files, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from csa_dispatch import Backend, Call, register_backend, unregister_backend
from csa_dispatch.cli import app
from csa_dispatch.testing.mutants import Mutation, PlainBackend

MATRIX = """
name = "small"
backends = ["eager"]

[[group]]
name = "one"
source = "list"
cases = [{ tokens = 4, head_dim = 16 }]
"""


@pytest.fixture
def matrix(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(MATRIX)
    return str(path)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["parity", *arguments], env={"COLUMNS": "100"})


def test_a_green_run_exits_0_and_writes_what_was_asked_for(matrix: str, tmp_path: Path):
    paths = {name: tmp_path / f"report.{name}" for name in ("report", "junit", "html")}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    result = invoke("--matrix", matrix, *options)
    assert result.exit_code == 0, result.output
    assert "parity holds: 1 pass" in result.output
    data = json.loads(paths["report"].read_text())
    assert data["matrix"]["path"] == matrix
    assert {"torch", "python", "device_name", "date", "command"} <= set(data["environment"])
    assert ElementTree.parse(paths["junit"]).getroot().get("tests") == "1"
    assert paths["html"].read_text().startswith("<!doctype html>")


def test_json_to_standard_output_stands_alone(matrix: str):
    result = invoke("--matrix", matrix, "--json")
    assert json.loads(result.stdout)["counts"]["pass"] == 1


def test_a_failure_exits_1_and_still_writes_the_report(matrix: str, tmp_path: Path):
    class Broken(PlainBackend):
        def forward(self, call: Call):
            raise ZeroDivisionError("no such kernel")

    backend: Backend = Broken(Mutation("broken"))
    register_backend(backend)
    try:
        path = tmp_path / "report.json"
        result = invoke("--matrix", matrix, "--backend", "broken", "--report", str(path))
    finally:
        unregister_backend("broken")
    assert result.exit_code == 1
    assert "no such kernel" in result.output
    assert json.loads(path.read_text())["exit_code"] == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--backend", "egaer"], "Did you mean 'eager'?"),
        (["--require", "nobody"], "--require is 'nobody'"),
        (["--filter", "nothing like it"], "no cell to run"),
        (["--part", "half"], "--part is 'half'; it must be I/N, such as 1/4"),
        (["--part", "3/2"], "part is 3/2; it must be i/n with i from 1 to n"),
        (["--part", "0/2"], "part is 0/2; it must be i/n with i from 1 to n"),
        (["--matrix", "absent.toml"], "absent.toml: no such file"),
        (["--html", "/"], "Is a directory: '/'"),
        (["--html", "-"], "--html is '-'; it must be a file. Pass the name of one."),
        (["--html", "out/x", "--report", "out/../out/x"], "--html is 'out/x'; it must be another"),
    ],
)
def test_a_usage_error_exits_2_with_one_line(matrix: str, options: list[str], text: str):
    result = invoke("--matrix", matrix, *options)
    assert result.exit_code == 2
    message = " ".join(result.output.split())
    assert message.startswith("error: ")
    assert text in message
    assert "Traceback" not in result.output


def test_a_malformed_matrix_exits_2_with_file_and_key(tmp_path: Path):
    path = tmp_path / "m.toml"
    path.write_text(MATRIX.replace("head_dim", "head_dimension"))
    result = invoke("--matrix", str(path))
    assert result.exit_code == 2
    assert "m.toml:group[0].cases[0].head_dimension:" in "".join(result.output.split())


def test_an_unknown_device_exits_2(matrix: str):
    result = invoke("--matrix", matrix, "--device", "tpu")
    assert result.exit_code == 2
    assert "not cpu or cuda" in result.output
