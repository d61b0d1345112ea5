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
from csa_dispatch.parity.results import TENSORS
from csa_dispatch.testing import TensorVerdict

from .figures import picture
from .model import LABELS, parameter_count
from .replay import Cell
from .results import DemoResults, milliseconds_text

_TEMPLATE = "report.html"


class Written(NamedTuple):
    """Where the files are."""

    html: Path
    png: Path
    data: Path


class ParityRow(NamedTuple):
    """One layer on one backend and device.

    Attributes:
        layer: what the layer is called.
        opens: the first row of its layer.
        bands: for each dtype the verdict on each tensor (None: no such tensor, or it did not
            run) and the time in ms.
    """

    layer: str
    opens: bool
    backend: str
    bands: list[tuple[list[TensorVerdict | None], str]]


def write_report(results: DemoResults, folder: Path) -> Written:
    """Write ``report.html``, ``demo.png`` and ``demo.json`` into ``folder``, which is made.

    Raises:
        OSError: the folder cannot be written to.
    """
    png = picture(results.history, results.masses)
    written = Written(folder / "report.html", folder / "demo.png", folder / "demo.json")
    write_atomically(written.png, png)
    write_atomically(written.data, json.dumps(results.to_dict(), indent=1) + "\n")
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
        parameters=parameter_count(results.config.model),
        labels=LABELS,
        csa_layer=next((x.number for x in results.layers if x.call.kv_indices is not None), 0),
        picture=base64.b64encode(png).decode("ascii"),
        tensors=TENSORS,
        dtypes=results.dtypes,
        rows=_parity_rows(results),
        whys=dict.fromkeys(item.decision.why for item in results.explained),
        notes=results.notes(),
    )


def _parity_rows(results: DemoResults) -> list[ParityRow]:
    rows: list[ParityRow] = []
    layer_before = 0
    for cells in results.by_row():
        first = next(iter(cells.values()))
        bands = [_band(cells.get(dtype)) for dtype in results.dtypes]
        name = f"{first.layer} {first.label}"
        rows.append(ParityRow(name, first.layer != layer_before, first.where, bands))
        layer_before = first.layer
    return rows


def _band(cell: Cell | None) -> tuple[list[TensorVerdict | None], str]:
    if cell is None:
        return [None] * len(TENSORS), ""
    verdicts = {verdict.name: verdict for verdict in cell.verdicts}
    return [verdicts.get(name) for name in TENSORS], milliseconds_text(cell.seconds)
