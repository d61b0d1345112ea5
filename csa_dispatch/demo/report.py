"""The files a demo leaves behind: an HTML report, a picture and the data, each written whole."""

from __future__ import annotations

import base64
import json
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from csa_dispatch.parity.console import seconds_text, share_text
from csa_dispatch.parity.files import write_atomically

from .figures import picture
from .model import LABELS
from .results import DemoResults

_TEMPLATE = "report.html"


class Written(NamedTuple):
    """Where the files are."""

    html: Path
    png: Path
    data: Path


def write_report(results: DemoResults, folder: Path) -> Written:
    """Write ``report.html``, ``demo.png`` and ``demo.json`` into ``folder``, which is made.

    Raises:
        OSError: the folder cannot be written to.
    """
    png = picture(results.history, results.masses)
    written = Written(folder / "report.html", folder / "demo.png", folder / "demo.json")
    write_atomically(written.png, png)
    write_atomically(written.data, json.dumps(results.to_dict(), indent=1, allow_nan=True) + "\n")
    write_atomically(written.html, html_text(results, png))
    return written


def html_text(results: DemoResults, png: bytes) -> str:
    """The report as one page without external resources; ``png`` is embedded."""
    source = resources.files("csa_dispatch.demo") / _TEMPLATE
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        share=share_text, duration=seconds_text, percent=lambda x: f"{x:.1%}"
    )
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        results=results,
        history=results.history,
        labels=LABELS,
        picture=base64.b64encode(png).decode("ascii"),
        tensors=("output", "lse", "dquery", "dlocal_kv", "dsparse_kv", "dsink"),
        every=len(results.layers),
    )
