"""``csa-dispatch doctor``: the environment in one page, with one-line verdicts."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from typing import Annotated, NamedTuple

import torch
import typer
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..policy import current_policy
from ..registry import backends
from ..settings import PREFIX, VARIABLES, reload_settings
from .backends import backend_data
from .output import console, print_json


class Verdict(NamedTuple):
    """One checked thing: level is "ok", "note" or "problem"."""

    level: str
    what: str
    text: str


def _versions() -> list[Verdict]:
    found = [
        Verdict("ok", "csa-dispatch", __version__),
        Verdict("ok", "python", f"{platform.python_version()} ({sys.executable})"),
        Verdict("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
    ]
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 9):
        found[-1] = Verdict("problem", "torch", f"{torch.__version__}; needs 2.9 or newer")
    return found


def _devices() -> list[Verdict]:
    if not torch.cuda.is_available():
        text = "none: the eager backend runs on the CPU"
        if torch.version.cuda is None:
            text += " (this torch is a CPU build)"
        return [Verdict("note", "CUDA devices", text)]
    found: list[Verdict] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
        found.append(Verdict("ok", f"cuda:{index}", text))
    return found


def _environment() -> list[Verdict]:
    found: list[Verdict] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            known = reload_settings()
        except ValueError as error:
            return [Verdict("problem", "environment", str(error))]
    for warning in caught:
        found.append(Verdict("problem", "environment", str(warning.message)))
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name in VARIABLES:
            found.append(Verdict("note", name, f"{os.environ[name]} ({VARIABLES[name]})"))
    for name, value in (
        ("CSA_DISPATCH_BACKEND", known.backend),
        ("CSA_DISPATCH_BACKWARD_BACKEND", known.backward_backend),
    ):
        if value is not None and value not in backends():
            known_names = ", ".join(backends())
            text = f"{value!r} is not a known backend; known: {known_names}"
            found.append(Verdict("problem", name, text))
    try:
        policy = current_policy(known.policy)
        text = f"{policy.name}, {len(policy.rules)} rules"
        found.append(Verdict("ok", "policy", text))
    except (OSError, ValueError) as error:
        found.append(Verdict("problem", "policy", str(error)))
    return found


def _backends() -> list[Verdict]:
    found: list[Verdict] = []
    for row in backends().values():
        reason = row.availability.reason
        if row.available:
            found.append(Verdict("ok", row.name, row.availability.version or "built in"))
        else:
            level = "note" if row.backend is not None else "problem"
            found.append(Verdict(level, row.name, str(reason)))
    return found


def diagnose() -> list[Verdict]:
    """Every verdict, in display order."""
    return [*_versions(), *_devices(), *_environment(), *_backends()]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Check the environment; exits 1 when something is wrong."""
    verdicts = diagnose()
    problems = [verdict for verdict in verdicts if verdict.level == "problem"]
    if as_json:
        print_json(
            {
                "verdicts": [verdict._asdict() for verdict in verdicts],
                "backends": [backend_data(row) for row in backends().values()],
                "problems": len(problems),
            }
        )
    else:
        table = Table(title="csa-dispatch doctor", title_justify="left", expand=False)
        table.add_column("")
        table.add_column("what", style="bold", no_wrap=True)
        table.add_column("finding")
        marks = {"ok": "[green]ok[/green]", "note": "note", "problem": "[red]problem[/red]"}
        for verdict in verdicts:
            table.add_row(marks[verdict.level], escape(verdict.what), escape(verdict.text))
        console.print(table)
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        summary = count if problems else "nothing wrong"
        console.print(summary, highlight=False)
    if problems:
        raise typer.Exit(1)
