"""What every command shares: JSON or a table on standard output, errors as one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)


def print_json(data: object) -> None:
    """Machine-readable output, alone on standard output."""
    typer.echo(json.dumps(data, indent=2, sort_keys=False))


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a bad argument into one line and exit code 2, never a traceback."""
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
