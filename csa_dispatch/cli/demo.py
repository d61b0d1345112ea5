"""``csa-dispatch demo``: a small model learns real text, then all backends replay its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..demo.console import render
from ..demo.corpus import CorpusError
from ..demo.report import write_report
from ..demo.run import run_demo
from ..demo.train import TrainConfig
from ..parity.files import check_writable
from ..reasons import BackendRefused
from .output import console, errors, print_json, usage_errors


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Of weights and text drawn.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Spans of 256 bytes a step.")] = 8,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: torch's.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where to train: cpu, cuda, or auto (cuda where there is one).")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Train a byte-level model of V4 layers on real text and replay it on every backend.

    Writes report.html, demo.png and demo.json. Exits 1 when the loss does not fall or a backend
    disagrees with the oracle, 2 on a bad argument. CSA_DISPATCH_BACKEND forces a backend for
    training; TRITON_INTERPRET=1 adds the Triton kernels to the replay where there is no GPU.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise typer.BadParameter(f"{device!r} is not cpu, cuda or auto", param_hint="--device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if threads is not None:
        torch.set_num_threads(threads)
    config = TrainConfig(steps=steps, batch=batch, seed=seed, device=device)
    with usage_errors():
        check_writable(str(out / "report.html"))
        try:
            results = run_demo(config, errors if as_json else console)
        except (CorpusError, BackendRefused) as error:
            errors.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from None
        written = write_report(results, out)
    if as_json:
        print_json(results.to_dict())
    else:
        console.print(render(results))
        for path in written:
            console.print(f"wrote {path}", style="dim", highlight=False)
    if results.faults:
        raise typer.Exit(1)
