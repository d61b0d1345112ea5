"""The ``csa-dispatch`` command; one module a subcommand."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from .backends import backends
from .bench import bench
from .conformance import conformance
from .demo import demo
from .doctor import doctor
from .explain import explain
from .parity import parity

app = typer.Typer(
    name="csa-dispatch",
    help="Compressed sparse attention: which backend runs, why, and do they all agree.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (backends, explain, parity, conformance, bench, demo, doctor):
    app.command(command.__name__)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("csa-dispatch"))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    del version  # its callback has printed it


def main() -> None:
    """Entry point of the console script."""
    app()
