"""``csa-dispatch parity``: do the backends agree with the oracle, on this machine?"""

from __future__ import annotations

from typing import Annotated

import typer

from ..parity import console as screen
from ..parity.files import check_places
from ..parity.matrix import load_matrix
from ..parity.report_html import write_html
from ..parity.report_json import json_text, write_json
from ..parity.report_junit import write_junit
from ..parity.results import ParityRun
from ..parity.runner import run_matrix
from .output import console, errors, usage_errors


def parity(
    matrix: Annotated[
        str,
        typer.Option(
            help="Matrix file (TOML), or the name of a shipped one: ci.toml, gpu.toml, dsv4.toml, "
            "edge.toml."
        ),
    ] = "ci.toml",
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Run this backend; repeatable. Default: the matrix's."),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="Fail when this backend is unavailable or refuses a case; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the matrix's.")] = None,
    text: Annotated[
        str, typer.Option("--filter", help="Only cells whose id contains this text.")
    ] = "",
    part: Annotated[
        str, typer.Option(help="I/N: the I-th of N parts, to run them side by side.")
    ] = "1/1",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    junit: Annotated[str | None, typer.Option(help="Write JUnit XML here.")] = None,
    html: Annotated[
        str | None, typer.Option(help="Write a self-contained HTML report here.")
    ] = None,
) -> None:
    """Run every backend against the float64 oracle, forward and backward.

    Exits 0 when every cell passed or was rightly refused, 1 on any failure, 2 on a bad argument
    or matrix.
    """
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not cpu or cuda", param_hint="--device")
    with usage_errors():
        loaded = load_matrix(matrix)
        check_places({"--report": report, "--junit": junit, "--html": html})
        with screen.progress(errors, f"parity {loaded.name}") as listener:
            run = run_matrix(
                loaded,
                backends=backend or (),
                required=require or (),
                device=device,
                text=text,
                part=_part(part),
                listener=listener,
            )
        _write(run, as_json, report, junit, html)
    if run.exit_code:
        raise typer.Exit(run.exit_code)


def _part(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal()):
        raise ValueError(f"--part is {text!r}; it must be I/N, such as 1/4")
    return int(number), int(parts)


def _write(
    run: ParityRun, as_json: bool, report: str | None, junit: str | None, html: str | None
) -> None:
    """Print the run and write the reports that were asked for."""
    if as_json:
        typer.echo(json_text(run), nl=False)
    else:
        console.print(screen.render(run))
    writers = ((report, write_json), (junit, write_junit), (html, write_html))
    for path, write in writers:
        if path is not None:
            write(run, path)
            errors.print(f"wrote {path}", style="dim", highlight=False)
