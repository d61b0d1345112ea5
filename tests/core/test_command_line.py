"""What all commands have in common: --json, and where errors go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from csa_dispatch.cli import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_a_flag_of_every_command(name: str) -> None:
    (option,) = (item for item in COMMANDS[name].params if "--json" in item.opts)
    assert option.is_flag


def test_json_stands_alone_on_standard_output() -> None:
    result = CliRunner().invoke(app, ["explain", "--device", "sm_90", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["forward"] == "triton"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--device", "sm_90", "--backend", "egaer"], "Did you mean 'eager'?"),
        (["parity", "--matrix", "nowhere.toml"], "nowhere.toml: no such file"),
        (["bench", "--suite", "nowhere.toml"], "nowhere.toml: no such file"),
        (["conformance", "egaer"], "Did you mean 'eager'?"),
    ],
)
def test_an_error_is_text_on_standard_error_with_json_too(
    arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    text = " ".join(result.stderr.split())
    assert text.startswith("error: ")
    assert message in text


def test_a_missing_policy_of_the_environment_is_one_line(
    tmp_path: Path, environment: object
) -> None:
    environment("CSA_DISPATCH_POLICY", str(tmp_path / "p.toml"))  # type: ignore[operator]
    result = CliRunner().invoke(app, ["explain", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: CSA_DISPATCH_POLICY: policy is ")
