"""What the demo leaves behind: complete files, written whole, and honest exit codes."""

from __future__ import annotations

import importlib
import io
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from csa_dispatch import reload_settings
from csa_dispatch.cli import app
from csa_dispatch.demo.console import render
from csa_dispatch.demo.mass import attention_mass
from csa_dispatch.demo.model import bits_per_byte
from csa_dispatch.demo.replay import explain_layers, replay
from csa_dispatch.demo.report import html_text, write_report
from csa_dispatch.demo.results import DemoResults
from csa_dispatch.demo.sample import read_sample
from csa_dispatch.demo.train import TrainConfig
from csa_dispatch.parity.environment import environment

FILES = ["demo.json", "demo.png", "report.html"]


@pytest.fixture(scope="module")
def results(trained, brief, corpus, layers):
    return DemoResults(
        config=brief,
        corpus=corpus,
        history=trained.history,
        seconds=1.5,
        layers=layers,
        explained=explain_layers(layers, "cpu"),
        cells=replay(layers, ["cpu"]),
        masses=[attention_mass(layer) for layer in layers],
        sample=read_sample(trained.model, trained.held_out[0], layers),
        environment=environment("cpu", ["eager"]),
    )


def test_the_files_are_written_whole_and_alone(results, tmp_path):
    folder = tmp_path / "deep" / "demo"
    written = write_report(results, folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert written.png.read_bytes().startswith(b"\x89PNG")
    assert written.png.stat().st_size > 20_000
    assert json.loads(written.data.read_text())["ok"] is True
    assert written.html.read_text().rstrip().endswith("</html>")


def test_a_report_that_cannot_be_written_leaves_what_was_there(results, tmp_path):
    (tmp_path / "demo.json").write_text("before")
    (tmp_path / "demo.png").mkdir()
    with pytest.raises(OSError, match=r"demo\.png"):
        write_report(results, tmp_path)
    assert (tmp_path / "demo.json").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


def test_the_page_needs_nothing_from_elsewhere_and_shows_every_layer(results):
    page = html_text(results, b"\x89PNG")
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "http" not in page
    for layer in results.layers:
        assert f"{layer.number} {layer.label}" in page
        assert layer.sizes in page
    for cell in results.cells:
        assert cell.backend in page


def test_faults_make_the_results_fail_everywhere(results):
    broken = results.cells[0]._replace(status="fail", message="output: off by <one>")
    wrong = results._replace(cells=[broken, *results.cells[1:]])
    assert wrong.to_dict()["ok"] is False
    assert "off by &lt;one&gt;" in html_text(wrong, b"")
    assert "off by <one>" in _printed(wrong)
    flat = results.history._replace(improvement=0.0)
    assert "did not fall" in results._replace(history=flat).faults[0]
    assert results._replace(cells=[]).faults == ["no backend ran the replay"]


def test_an_infinite_share_is_null_in_json(results):
    verdict = results.cells[0].verdicts[0]._replace(share=float("inf"), error=float("inf"))
    cell = results.cells[0]._replace(verdicts=(verdict,))
    text = json.dumps(results._replace(cells=[cell]).to_dict(), allow_nan=False)
    assert json.loads(text)["parity"][0]["share"] is None


def test_the_terminal_view_fits_eighty_columns(results):
    text = _printed(results)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut off


def _printed(results: DemoResults) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(results))
    return capture.get()


@pytest.fixture
def run_command(monkeypatch, brief, tmp_path):
    """Runs the command with the small model's sizes."""

    def run(*arguments: str, **sizes: object):
        small = replace(brief, **sizes)
        fields = {name: getattr(small, name) for name in KEPT}
        # The package's attribute of this name is the command, not its module.
        command = importlib.import_module("csa_dispatch.cli.demo")
        monkeypatch.setattr(command, "TrainConfig", partial(TrainConfig, **fields))
        return CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *arguments])

    return run


KEPT = ("model", "tokens", "held_out_spans", "evaluations", "warm_up", "learning_rate")


def test_the_command_prints_json_alone_and_writes_the_files(run_command, tmp_path):
    done = run_command("--json", "--steps", "12", "--batch", "4", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["training"]["steps"] == 12
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


def test_the_command_fails_when_the_loss_does_not_fall(run_command):
    done = run_command("--steps", "1", "--batch", "1", "--device", "cpu", learning_rate=0.0)
    assert done.exit_code == 1
    assert "did not fall" in done.stdout


def test_a_forced_backend_that_cannot_run_is_one_message_and_no_traceback(
    run_command, monkeypatch
):
    monkeypatch.setenv("CSA_DISPATCH_BACKEND", "triton")
    reload_settings()
    try:
        done = run_command("--steps", "1", "--device", "cpu")
    finally:
        monkeypatch.delenv("CSA_DISPATCH_BACKEND")
        reload_settings()
    assert done.exit_code == 1
    assert "triton: device_type is cpu" in done.stderr
    assert "Traceback" not in done.output


def test_an_unknown_device_is_a_usage_error(run_command):
    assert run_command("--device", "abacus").exit_code == 2


def test_the_sample_is_the_held_out_text_with_its_cost(results, trained):
    span = trained.held_out[0]
    letters = results.sample.letters
    plain = "".join(letter.shown for letter in letters)
    expected = bytes(span.tolist()).decode("latin-1").replace("\n", "↵\n").replace("\t", "→   ")
    assert [a for a, b in zip(plain, expected, strict=True) if a != b and a != "·"] == []
    costs = [letter.bits for letter in letters[1:]]
    with torch.no_grad():
        loss = bits_per_byte(trained.model(span[None, :-1])[0], span[None, 1:])
    assert sum(costs) / len(costs) == pytest.approx(float(loss), rel=1e-5)


def test_the_sample_marks_what_the_last_query_sees(results, layers):
    marks = [letter.seen for letter in results.sample.letters]
    assert results.sample.layer == "2 CSA"
    tokens = len(marks) - 1
    assert marks[tokens - 4 : tokens] == ["window"] * 4
    assert marks[tokens] == ""  # only predicted
    picks = sorted(layers[1].call.kv_indices[0, -1].tolist())
    covered = {token for pick in picks for token in range(pick * 4, pick * 4 + 4)}
    picked = {token for token, mark in enumerate(marks) if mark == "picked"}
    assert picked == covered - set(range(tokens - 4, tokens))
