"""``csa-dispatch conformance``: does an installed backend keep the plug-in contract?"""

from __future__ import annotations

from typing import Annotated

import typer

from ..registry import known_backend
from ..testing.conformance import check_backend
from .output import errors, print_json, usage_errors


def conformance(
    name: Annotated[str, typer.Argument(help="An installed backend's name.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    level: Annotated[
        str, typer.Option(help="quick (seconds on a CPU) or full (minutes).")
    ] = "quick",
    check: Annotated[
        list[str] | None, typer.Option(help="Run this check alone; repeatable. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Hold one backend to everything a backend owes, on small calls within its claims.

    Exits 0 when no check failed, 1 on any failure, 2 on a bad argument.
    """
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not cpu or cuda", param_hint="--device")
    with usage_errors():
        row = known_backend(name, "NAME")
        if row.backend is None:
            raise ValueError(f"{name} could not be loaded: {row.availability.reason}")
        with errors.status(f"conformance of {name}") as status:
            report = check_backend(
                row.backend,
                device,
                level,
                checks=check,
                listener=lambda result: status.update(f"{name}: {result.name} {result.status}"),
            )
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(str(report))
    if not report.passed:
        raise typer.Exit(1)
