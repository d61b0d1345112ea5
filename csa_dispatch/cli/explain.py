"""``csa-dispatch explain``: what would run a described call, here or on other hardware."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..call import Kind
from ..call_spec import ABSENT, CallSpec
from ..explain import explain as explain_call
from ..operations import SPECS, AnySpec
from ..policy import use_policy
from ..routing import Decision
from ..validation import fail
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
    operation: Annotated[
        str, typer.Option(help=f"What is called: {', '.join(SPECS)}.")
    ] = "attention",
    device: Annotated[
        str | None,
        typer.Option(help="Hardware to ask about: sm_90, sm_103, cpu. Default: this machine."),
    ] = None,
    kind: Annotated[Kind | None, typer.Option(help="Layer kind (attention); gather.")] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32 or float64.")
    ] = "bfloat16",
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads, H; 64.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads, G; 1.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens, T; 4096.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="D; 512, an indexer's 128.")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Sliding window, W; 128.")] = None,
    slots: Annotated[
        int | None, typer.Option(min=0, help="Selected entries a query, K; 512.")
    ] = None,
    topk: Annotated[
        int | None, typer.Option(min=1, help="Picks a token (lightning_indexer); 512.")
    ] = None,
    pool: Annotated[int | None, typer.Option(min=0, help="Pool rows, S; 1024.")] = None,
    compress_ratio: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens an entry; 4, of dense-compressed attention 128."),
    ] = None,
    overlapping: Annotated[
        bool | None, typer.Option(help="Form of compress_kv; overlapping at ratio 4.")
    ] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="Of an indexer's weights; float32.")
    ] = None,
    bias_dtype: Annotated[
        str | None, typer.Option(help="Of compress_kv's position_bias; float32.")
    ] = None,
    with_past: Annotated[
        bool | None, typer.Option(help="Tokens came before the first (lightning_indexer).")
    ] = None,
    documents: Annotated[
        str, typer.Option(help="none, cu_seqlens, or doc_ids (attention).")
    ] = "none",
    grad: Annotated[
        bool | None, typer.Option(help="Whether gradients are needed; yes where there are any.")
    ] = None,
    deterministic: Annotated[bool, typer.Option(help="Deterministic algorithms.")] = False,
    backend: Annotated[str | None, typer.Option(help="Force a backend.")] = None,
    backward_backend: Annotated[str | None, typer.Option(help="Force the backward's.")] = None,
    policy: Annotated[str | None, typer.Option(help="Path of a policy file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Say which backend would run a call, why, and why not each of the others.

    Exits 0 when one would, 1 when none can, 2 on a bad argument.
    """
    device_type, capability = _this_device()
    options: dict[str, Any] = {
        "dtype": dtype,
        "device_type": device_type,
        "capability": capability,
        "kind": kind,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "head_dim": head_dim,
        "window": window,
        "slots": slots,
        "topk": topk,
        "pool": pool,
        "compress_ratio": compress_ratio,
        "overlapping": overlapping,
        "weights_dtype": weights_dtype,
        "bias_dtype": bias_dtype,
        "with_past": with_past,
        "documents": documents,
        "grad": grad,
        "deterministic": deterministic,
    }
    given = {
        name: value for name, value in options.items() if name == "capability" or value is not None
    }
    with usage_errors():
        spec = _spec(operation, given)
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


def _spec(operation: str, given: dict[str, Any]) -> AnySpec:
    """The spec of an operation from the options that were given.

    Raises:
        ValueError: no such operation, or an option that it does not have.
    """
    if operation not in SPECS:
        required = f"one of {', '.join(SPECS)}"
        fail("--operation", repr(operation), required, "Leave it out for attention.")
    fields = SPECS[operation]._fields
    known = [*fields, "grad"] if "needs_grad" in fields else fields
    if foreign := [name for name in given if name not in known]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ValueError(f"{operation} has no {names}. Leave it out, or name another --operation.")
    grad = given.pop("grad", True)
    if operation == "attention":
        return _attention_spec(given, grad)
    if operation == "compress_kv":
        given.setdefault("overlapping", given.get("compress_ratio", 4) == 4)
        given["needs_grad"] = (grad,) * 3
    return SPECS[operation](**given)


def _attention_spec(given: dict[str, Any], grad: bool) -> CallSpec:
    kind = given.get("kind", Kind.GATHER)
    for field, (_, remedy) in ABSENT[kind].items():
        if given.get(field):
            option = f"--{field.replace('_', '-')}"
            fail(option, given[field], f"left out with --kind {kind.value}", remedy)
    gather, window_only = kind is Kind.GATHER, kind is Kind.WINDOW
    ratio = given.pop("compress_ratio", 128)
    given |= {
        "compress_ratio": ratio if kind is Kind.DENSE else 0,
        "index_dtype": "int32" if gather else "none",
        "needs_grad": (grad, grad, grad and not window_only, grad),
    }
    if not gather:
        given["slots"] = 0
    if window_only:
        given["pool"] = 0
    return CallSpec(**given)


def _print(decision: Decision, device: str | None) -> None:
    spec = decision.spec
    where = device or ("this machine, " + _device_name(spec))
    what = spec.kind.value if isinstance(spec, CallSpec) else spec.operation
    title = f"{what}, {spec.dtype}, head_dim {spec.head_dim}, {where}"
    console.print(decision_table(decision, title))
    console.print(f"forward: [bold]{decision.forward or 'none'}[/bold]", highlight=False)
    if spec.differentiable:
        console.print(f"backward: [bold]{decision.backward or 'none'}[/bold]", highlight=False)
    console.print(escape(f"why: {decision.why} (policy {decision.policy})"), highlight=False)
    for note in decision.notes:
        console.print(escape(f"note: {note}"), highlight=False)


def _explain(
    spec: AnySpec, device: str | None, backend: str | None, backward_backend: str | None
) -> Decision:
    return explain_call(spec, device=device, backend=backend, backward_backend=backward_backend)


def _this_device() -> tuple[str, int | None]:
    import torch

    from ..call_spec import device_capability

    if torch.cuda.is_available():
        return "cuda", device_capability(torch.device("cuda", torch.cuda.current_device()))
    return "cpu", None


def _device_name(spec: AnySpec) -> str:
    return spec.device_type if spec.capability is None else f"sm_{spec.capability}"
