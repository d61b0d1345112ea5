"""``csa-dispatch explain``: what would run a described call, here or on other hardware."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..call import Kind
from ..call_spec import CallSpec
from ..explain import explain as explain_call
from ..policy import use_policy
from ..routing import Decision
from .output import console, print_json, usage_errors


def decision_table(decision: Decision, title: str = "") -> Table:
    """A Decision as a table: one row an entry of the preference order."""
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("reasons")
    chosen = False
    for item in decision.considered:
        if item.reasons:
            verdict = "[red]cannot[/red]"
        elif chosen:
            verdict = "could"
        else:
            verdict, chosen = "[green]runs it[/green]", True
        reasons = "\n".join(escape(str(reason)) for reason in item.reasons)
        table.add_row(escape(str(item.entry)), verdict, reasons)
    return table


def explain(
    kind: Annotated[Kind, typer.Option(help="Layer kind.")] = Kind.GATHER,
    device: Annotated[
        str | None,
        typer.Option(help="Hardware to ask about: sm_90, sm_103, cpu. Default: this machine."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32 or float64.")
    ] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads, H.")] = 64,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads, G.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Query tokens, T.")] = 4096,
    head_dim: Annotated[int, typer.Option(min=1, help="D.")] = 512,
    window: Annotated[int, typer.Option(min=0, help="Sliding window, W.")] = 128,
    slots: Annotated[int, typer.Option(min=0, help="Selected entries a query, K.")] = 512,
    pool: Annotated[int, typer.Option(min=0, help="Pool rows, S.")] = 1024,
    compress_ratio: Annotated[int, typer.Option(min=1, help="Dense-compressed kind.")] = 128,
    documents: Annotated[str, typer.Option(help="none, cu_seqlens or doc_ids.")] = "none",
    grad: Annotated[bool, typer.Option(help="Whether gradients are needed.")] = True,
    deterministic: Annotated[bool, typer.Option(help="Deterministic algorithms.")] = False,
    backend: Annotated[str | None, typer.Option(help="Force a backend.")] = None,
    backward_backend: Annotated[str | None, typer.Option(help="Force the backward's.")] = None,
    policy: Annotated[str | None, typer.Option(help="Path of a policy file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Say which backend would run a call, why, and why not each of the others.

    Exits 0 when one would, 1 when none can, 2 on a bad argument.
    """
    gather, window_only = kind is Kind.GATHER, kind is Kind.WINDOW
    device_type, capability = _this_device()
    spec = CallSpec(
        kind=kind,
        dtype=dtype,
        device_type=device_type,
        capability=capability,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        pool=0 if window_only else pool,
        slots=slots if gather else 0,
        window=window,
        compress_ratio=compress_ratio if kind is Kind.DENSE else 0,
        index_dtype="int32" if gather else "none",
        documents=documents,
        needs_grad=(grad, grad, grad and not window_only, grad),
        deterministic=deterministic,
    )
    with usage_errors():
        if policy is None:
            decision = _explain(spec, device, backend, backward_backend)
        else:
            with use_policy(policy):
                decision = _explain(spec, device, backend, backward_backend)
    if as_json:
        print_json(decision.to_dict())
    else:
        _print(decision, device)
    if decision.forward is None:
        raise typer.Exit(1)


def _print(decision: Decision, device: str | None) -> None:
    spec = decision.spec
    where = device or ("this machine, " + _device_name(spec))
    title = f"{spec.kind.value}, {spec.dtype}, head_dim {spec.head_dim}, {where}"
    console.print(decision_table(decision, title))
    console.print(f"forward: [bold]{decision.forward}[/bold]", highlight=False)
    if spec.differentiable:
        console.print(f"backward: [bold]{decision.backward}[/bold]", highlight=False)
    console.print(escape(f"why: {decision.why} (policy {decision.policy})"), highlight=False)
    for note in decision.notes:
        console.print(escape(f"note: {note}"), highlight=False)


def _explain(
    spec: CallSpec, device: str | None, backend: str | None, backward_backend: str | None
) -> Decision:
    return explain_call(spec, device=device, backend=backend, backward_backend=backward_backend)


def _this_device() -> tuple[str, int | None]:
    import torch

    from ..call_spec import device_capability

    if torch.cuda.is_available():
        return "cuda", device_capability(torch.device("cuda", torch.cuda.current_device()))
    return "cpu", None


def _device_name(spec: CallSpec) -> str:
    return spec.device_type if spec.capability is None else f"sm_{spec.capability}"
