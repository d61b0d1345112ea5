"""The operations beside attention as something to test: cases, ways to run them, and a judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa_dispatch.backend import Operation
from csa_dispatch.capabilities import ANY
from csa_dispatch.indexer_call import IndexerCall
from csa_dispatch.operations import AnySpec

from .budgets import TensorVerdict
from .compressor import NAMES, compressor_run, compressor_verdicts
from .compressor_cases import CompressorInputs, build_compressor, compressor_cases
from .indexer import build_indexer, indexer_cases, indexer_run, judge_picks

DTYPES = ("float32", "bfloat16", "float16", "float64")

Results = dict[str, Tensor | None]
"""What a run gave, by name; None for a gradient that was not asked for."""


class Suite(NamedTuple):
    """How one operation is tested. A case is of the operation's own class.

    Attributes:
        operation: its name.
        cases: the cases in each of some dtypes.
        inputs: a case's tensors and scalars on a device, a NamedTuple.
        direct: runs an implementation, without the dispatcher, on inputs.
        forced: runs the public function, forced to a backend, on inputs.
        judge: compares results on the CPU with the oracle's for a case.
    """

    operation: str
    cases: Callable[[Sequence[str]], Sequence[Any]]
    inputs: Callable[[Any, torch.device | str], Any]
    direct: Callable[[Operation, Any], Results]
    forced: Callable[[str, Any], Results]
    judge: Callable[[Any, Results], list[TensorVerdict]]


def _pick(implementation: Operation, call: IndexerCall) -> Results:
    with torch.no_grad():
        return {"picks": implementation.forward(call)}


def _compress(implementation: Operation, inputs: CompressorInputs) -> Results:
    call, grad_entries, needs = inputs
    with torch.no_grad():
        entries = implementation.forward(call)
        gradients = (None, None, None)
        if any(needs):
            gradients = implementation.backward(call, grad_entries, needs)
    return dict(zip(NAMES, (entries, *gradients), strict=True))


def _judge_compressor(case: Any, results: Results) -> list[TensorVerdict]:
    call, grad_entries, needs = build_compressor(case)
    verdicts = compressor_verdicts(call, list(results.values()), grad_entries)
    asked = (True, *needs)
    return verdicts + [
        TensorVerdict(
            name, torch.inf, torch.inf, 0.0, "is missing" if need else "was not asked for"
        )
        for (name, result), need in zip(results.items(), asked, strict=True)
        if (result is not None) != need
    ]


SUITES = {
    "lightning_indexer": Suite(
        "lightning_indexer",
        indexer_cases,
        build_indexer,
        _pick,
        lambda name, call: {"picks": indexer_run(name)(call)},
        lambda case, results: [judge_picks(build_indexer(case), _only(results))],
    ),
    "compress_kv": Suite(
        "compress_kv",
        compressor_cases,
        build_compressor,
        _compress,
        lambda name, inputs: dict(zip(NAMES, compressor_run(name)(inputs), strict=True)),
        _judge_compressor,
    ),
}
"""By operation."""


def _only(results: Results) -> Tensor:
    (result,) = results.values()
    assert result is not None
    return result


def directions(spec: AnySpec) -> tuple[str, ...]:
    """What a call of ``spec`` runs."""
    return ("forward", "backward") if spec.differentiable else ("forward",)


def reasons_of(implementation: Operation, spec: AnySpec) -> tuple[object, ...]:
    """Why an implementation does not claim a call, in the directions that it needs."""
    found = implementation.forward_capabilities.reasons(spec)
    if spec.differentiable:
        backward = implementation.backward_capabilities
        found += ("no backward",) if backward is None else backward.reasons(spec)
    return found


def claimed_cases(
    suite: Suite, implementation: Operation, device: str, capability: int | None
) -> Iterator[Any]:
    """The suite's cases that are claimed, with head counts and head dims that are."""
    bounds = implementation.forward_capabilities.bounds()
    dtypes = [name for name in DTYPES if name in bounds.get("dtype", ANY)]
    for case in suite.cases(dtypes):
        axes = {
            name: (getattr(case, name), *bounds[name].inside())
            for name in ("heads", "head_dim")
            if name in bounds and hasattr(case, name)
        }
        for fitted in _fitted(case, axes):
            if not reasons_of(implementation, fitted.spec(device, capability)):
                yield fitted
                break


def _fitted(case: Any, axes: dict[str, tuple[object, ...]]) -> Iterator[Any]:
    if not axes:
        yield case
        return
    name = next(iter(axes))
    rest = {other: values for other, values in axes.items() if other != name}
    for value in axes[name]:
        yield from _fitted(replace(case, **{name: value}), rest)
