"""``csa-dispatch bench``: how fast is each backend on this machine?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..bench.plots import write_png
from ..bench.report_json import json_text, write_json
from ..bench.results import BenchRun
from ..bench.runner import run_suite
from ..bench.suite import DIRECTIONS, load_suite
from ..bench.table import render
from ..parity.files import check_places
from .output import console, errors, usage_errors

_WIDTH = 150
"""Columns of the table where there is no terminal that it must fit into."""


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="Suite file (TOML), or the name of a shipped one: cpu.toml, h200.toml, "
            "scaling.toml."
        ),
    ] = "cpu.toml",
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Time this backend; repeatable. Default: the suite's."),
    ] = None,
    text: Annotated[
        str, typer.Option("--filter", help="Only cases whose name contains this text.")
    ] = "",
    direction: Annotated[
        list[str] | None,
        typer.Option(
            help="forward, backward, or both (one after the other in one timing); repeatable. "
            "Default: what each case asks for."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the suite's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    png: Annotated[
        str | None, typer.Option(help="Write a figure here: roofline, and time against T.")
    ] = None,
) -> None:
    """Time backends side by side, each checked against the oracle on sampled rows first.

    Exits 0 when everything that ran was right (a missed limit is only shown), 1 when a backend
    failed, 2 on a bad argument or suite, or when nothing could be timed. The report is brought up
    to date after every case.
    """
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not cpu or cuda", param_hint="--device")
    for name in direction or ():
        if name not in DIRECTIONS:
            words = ", ".join(DIRECTIONS)
            raise typer.BadParameter(f"{name!r} is not one of {words}", param_hint="--direction")
    with usage_errors():
        loaded = load_suite(suite)
        check_places({"--report": report, "--png": png})
        title = f"bench {loaded.name}"
        with errors.status(Text(title)) as status:  # a str would be read as markup

            def listen(run: BenchRun, coming: str) -> None:
                status.update(Text(f"{title}: {coming}"))
                if report is not None:
                    write_json(run, report)

            run = run_suite(
                loaded,
                backends=backend or (),
                device=device,
                text=text,
                directions=direction or (),
                listener=listen,
            )
        if as_json:
            typer.echo(json_text(run), nl=False)
        else:
            screen = console if console.is_terminal else Console(width=_WIDTH)
            screen.print(render(run, screen.width))
        if run.fault:
            errors.print(f"[red]error:[/red] {escape(run.fault)}")
        elif png is not None:
            write_png(run, png)
    if run.exit_code:
        raise typer.Exit(run.exit_code)
