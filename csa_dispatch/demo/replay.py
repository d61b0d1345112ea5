"""Replay: the trained layers' own tensors through every backend, each against the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import (
    Call,
    Decision,
    Gradients,
    Reason,
    backends,
    explain,
    record_receipts,
)
from csa_dispatch.testing import TensorVerdict, gradient_tensors, judge, targets
from csa_dispatch.testing.budgets import Target

from .capture import CapturedLayer, first_tokens, in_dtype, on_device
from .layers import arguments_of, attend

DTYPES = (torch.float32, torch.bfloat16)
"""What the layers trained in, and what the same layers would run in at scale."""

SLICE = 32
"""Query rows replayed on an interpreted backend, which takes milliseconds a tile."""


class Cell(NamedTuple):
    """One layer on one backend in one dtype.

    Attributes:
        layer: its number, from 1.
        label: window, CSA or HCA.
        backend, device, dtype: where and in what it ran.
        tokens: query rows replayed.
        sliced: fewer rows than the layer has, because the backend is interpreted.
        status: "pass", "fail", or "refused".
        verdicts: output, lse and every gradient against the oracle.
        reasons: why it was refused.
        seconds: forward and backward together; None when refused.
        message: what is wrong, empty for a pass.
    """

    layer: int
    label: str
    backend: str
    device: str
    dtype: str
    tokens: int
    sliced: bool
    status: str
    verdicts: tuple[TensorVerdict, ...] = ()
    reasons: tuple[Reason, ...] = ()
    seconds: float | None = None
    message: str = ""

    @property
    def where(self) -> str:
        """Backend and device as a table shows them; ``*`` marks a slice."""
        place = self.backend if self.device == "cpu" else f"{self.backend} ({self.device})"
        return place + ("*" if self.sliced else "")

    @property
    def share(self) -> float:
        """The largest share of its error budget any tensor used."""
        return max((verdict.share for verdict in self.verdicts), default=0.0)

    @property
    def error(self) -> float:
        """The largest relative error of output and gradients."""
        found = (item.error for item in self.verdicts if item.name != "lse")
        return max(found, default=0.0)


class Explained(NamedTuple):
    """What the policy chooses for layers that make the same call."""

    layers: tuple[int, ...]
    label: str
    sizes: str
    decision: Decision


def explain_layers(layers: Sequence[CapturedLayer], device: str) -> list[Explained]:
    """The Decision for every layer, equal ones together; gradients needed, as in training."""
    found: dict[tuple[str, str], Explained] = {}
    for layer in layers:
        decision = _decision(_leaves(on_device(layer.call, device)), None)
        key = (layer.sizes, str(decision))
        before = found[key].layers if key in found else ()
        numbers = (*before, layer.number)
        found[key] = Explained(numbers, layer.label, layer.sizes, decision)
    return list(found.values())


def replay(
    layers: Sequence[CapturedLayer],
    devices: Sequence[str],
    dtypes: Sequence[torch.dtype] = DTYPES,
    on_cell: Callable[[Cell], None] = lambda _: None,
) -> list[Cell]:
    """Run every layer on every known backend, device and dtype, forward and backward.

    A backend that is not available, or that does not take the call, gives a refused cell with
    its Reasons. Nothing is skipped silently.
    """
    cells: list[Cell] = []
    for layer in layers:
        for dtype in dtypes:
            exact = _References(layer, dtype)
            for device in devices:
                for name in backends():
                    cells.append(_cell(exact, name, device))
                    on_cell(cells[-1])
    return cells


def cell_count(
    layers: Sequence[CapturedLayer],
    devices: Sequence[str],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> int:
    """How many cells ``replay`` makes."""
    return len(layers) * len(devices) * len(dtypes) * len(backends())


class _References:
    """A layer in one dtype and what must come of it, whole and as a slice; each made once."""

    def __init__(self, layer: CapturedLayer, dtype: torch.dtype) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        self._layer = layer._replace(
            call=in_dtype(layer.call, dtype), grad_output=layer.grad_output.to(dtype)
        )
        self._made: dict[bool, tuple[CapturedLayer, dict[str, Target]]] = {}

    def layer(self, sliced: bool) -> CapturedLayer:
        return first_tokens(self._layer, SLICE) if sliced else self._layer

    def get(self, sliced: bool) -> tuple[CapturedLayer, dict[str, Target]]:
        if sliced not in self._made:
            layer = self.layer(sliced)
            self._made[sliced] = layer, targets(layer.call, layer.grad_output)
        return self._made[sliced]


def _cell(exact: _References, name: str, device: str) -> Cell:
    row = backends()[name]
    sliced = "interpreted" in row.availability.version and device == "cpu"
    layer = exact.layer(sliced)
    call = _leaves(on_device(layer.call, device))
    decision = _decision(call, name)
    blank = Cell(
        layer.number,
        layer.label,
        name,
        device,
        exact.dtype,
        call.query.shape[2],
        sliced,
        "refused",
    )
    if decision.forward is None:
        return blank._replace(reasons=decision.refused()[name])
    layer, wanted = exact.get(sliced)
    grad_output = layer.grad_output.to(device)
    try:
        if not sliced:
            _run(call, grad_output, name)  # what a first call compiles or allocates is not timed
        with record_receipts() as receipts:
            started = time.perf_counter()
            found = _run(call, grad_output, name)
            _wait(device)
            seconds = time.perf_counter() - started
    except Exception as error:
        return blank._replace(status="fail", message=f"{type(error).__name__}: {error}")
    verdicts = tuple(judge(wanted[key], found[key].cpu()) for key in wanted)
    messages = [f"{item.name}: {item.message}" for item in verdicts if not item.passed]
    ran = {(item.direction, item.backend) for item in receipts}
    if ran != {("forward", name), ("backward", name)}:
        messages.append(f"receipts say that {sorted(ran)} ran")
    return blank._replace(
        status="fail" if messages else "pass",
        verdicts=verdicts,
        seconds=seconds,
        message="; ".join(messages),
    )


def _leaves(call: Call) -> Call:
    """The call with leaves that need gradients, whose strides are the layer's own."""
    kept = [None if x is None else x.detach().requires_grad_() for x in _inputs(call)]
    query, local_kv, sparse_kv, attention_sink = kept
    assert query is not None
    assert local_kv is not None
    return call._replace(
        query=query, local_kv=local_kv, sparse_kv=sparse_kv, attention_sink=attention_sink
    )


def _inputs(call: Call) -> tuple[Tensor | None, ...]:
    return call.query, call.local_kv, call.sparse_kv, call.attention_sink


def _run(call: Call, grad_output: Tensor, name: str) -> dict[str, Tensor]:
    """Output, lse and every gradient, by the names of their targets."""
    output, lse = attend(call, backend=name)
    leaves = [leaf for leaf in _inputs(call) if leaf is not None]
    found = iter(torch.autograd.grad(output, leaves, grad_output))
    gradients = Gradients(*(None if leaf is None else next(found) for leaf in _inputs(call)))
    named = gradient_tensors(gradients)
    kept = {key: tensor for key, tensor in named.items() if tensor is not None}
    return {"output": output, "lse": lse, **kept}


def _decision(call: Call, backend: str | None) -> Decision:
    tensors, scalars = arguments_of(call)
    return explain(*tensors, **scalars, backend=backend)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
