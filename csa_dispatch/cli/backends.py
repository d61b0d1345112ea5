"""``csa-dispatch backends``: what is installed, in which version, and why not."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..registry import Row
from ..registry import backends as known_backends
from .output import console, print_json


def backend_data(row: Row) -> dict[str, object]:
    """One registry row as JSON-ready data."""
    reason = row.availability.reason
    backend = row.backend
    return {
        "name": row.name,
        "available": row.available,
        "version": row.availability.version,
        "reason": None if reason is None else reason._asdict(),
        "summary": "" if backend is None else backend.summary,
        "evidence": "" if backend is None else backend.evidence,
        "backward": backend is not None and backend.backward_capabilities is not None,
        "operations": [] if backend is None else ["attention", *backend.operations],
        "origin": row.origin,
    }


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """List every backend: version, evidence, and the reason when it cannot run here."""
    rows = list(known_backends().values())
    if as_json:
        print_json([backend_data(row) for row in rows])
        return
    table = Table(title="Backends", title_justify="left", expand=False)
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("here")
    table.add_column("version", overflow="fold")
    table.add_column("beside attention", no_wrap=True)
    table.add_column("what it is, or why not")
    for row in rows:
        reason = row.availability.reason
        text = str(reason) if reason is not None else ""
        if not text and row.backend is not None:
            text = row.backend.summary
        here = "[green]yes[/green]" if row.available else "[red]no[/red]"
        operations = "" if row.backend is None else "\n".join(row.backend.operations)
        version = row.availability.version
        table.add_row(escape(row.name), here, escape(version), escape(operations), escape(text))
    console.print(table)
