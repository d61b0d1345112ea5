"""What a field case is, how one is checked, and the comparisons that state its right answer.

A field case is a small input on which some released implementation was wrong. Its calls are
judged against the oracle like any other, and besides must satisfy what the case states by hand:
known values, exact zeros, or agreement between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csa_dispatch.call_spec import GRADIENT_INPUTS
from csa_dispatch.reasons import BackendRefused

from .cases import Inputs, to_call
from .check import CellResult, Outcome, Reference, Run, judge_outcome
from .targets import targets

TOLERANCE = {"float64": 1e-6, "float32": 2e-5, "bfloat16": 2.5e-2, "float16": 4e-3}
"""Largest error of outputs relative to the largest reference; gradients may have twice that.

For float64 it is what the digits of the values known by hand allow.
"""

LSE_TOLERANCE = 1e-4
"""Largest absolute error of lse."""

Calls = tuple[Inputs, ...]
Outcomes = tuple[Outcome, ...]


@dataclass(frozen=True)
class FieldCase:
    """One field case.

    Attributes:
        name: its id in the field list, what varies, and the dtype.
        fault: the class of fault it stands for.
        calls: builds the calls on a device.
        holds: what must hold of the calls and their outcomes, as messages of what does not.
    """

    name: str
    fault: str
    calls: Callable[[torch.device], Calls]
    holds: Callable[[Calls, Outcomes], Iterable[str]]


def check_field_case(case: FieldCase, run: Run, device: torch.device | str = "cpu") -> CellResult:
    """Run every call of ``case``, judge each against the oracle, then the case's own statement.

    Calls that repeat the same ``Inputs`` object run again each time.
    """
    calls = case.calls(torch.device(device))
    try:
        outcomes = tuple(run(inputs) for inputs in calls)
    except BackendRefused as refusal:
        return CellResult(case.name, "unsupported", (), str(refusal))
    except Exception as error:
        return CellResult(case.name, "fail", (), f"{type(error).__name__}: {error}")
    references: dict[int, Reference] = {}
    verdicts = []
    for inputs, outcome in zip(calls, outcomes, strict=True):
        if id(inputs) not in references:
            call = to_call(inputs)
            references[id(inputs)] = Reference(inputs, call, targets(call, inputs.grad_output))
        verdicts += judge_outcome(references[id(inputs)], outcome)
    messages = [f"{item.name}: {item.message}" for item in verdicts if not item.passed]
    messages += case.holds(calls, outcomes)
    status = "fail" if messages else "pass"
    return CellResult(case.name, status, tuple(verdicts), "; ".join(messages))


def make_inputs(
    dtype: str,
    device: torch.device,
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None = None,
    kv_indices: Tensor | Sequence[object] | None = None,
    sink: Tensor | Sequence[float] | None = None,
    *,
    window: int,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
    grad_output: Tensor | None = None,
    index_dtype: torch.dtype = torch.int32,
    needs_grad: Sequence[str] = GRADIENT_INPUTS,
) -> Inputs:
    """Inputs quantised to ``dtype`` on ``device``; the sink stays fp32 unless fp64.

    Shapes are BHSD, ``kv_indices`` ``[B, T, K]``; a missing ``grad_output`` is drawn from
    seed 0. Those of ``needs_grad`` that are given require gradients.
    """
    kind = getattr(torch, dtype)

    def rows(tensor: Tensor) -> Tensor:
        # A copy always: two arguments that are one tensor would get the sum of their gradients.
        return tensor.to(device=device, dtype=kind, copy=True)

    def ints(values: Tensor | Sequence[object] | None, to: torch.dtype) -> Tensor | None:
        if values is None:
            return None
        return torch.as_tensor(values).to(device=device, dtype=to)

    if grad_output is None:
        grad_output = randn(0, tuple(query.shape))[0]
    logit = None
    if sink is not None:
        logit = torch.as_tensor(sink, dtype=torch.float64).to(device)
        logit = logit if kind == torch.float64 else logit.float()
    made = Inputs(
        rows(query),
        rows(local_kv),
        None if sparse_kv is None else rows(sparse_kv),
        ints(kv_indices, index_dtype),
        logit,
        ints(cu_seqlens, torch.int32),
        ints(cu_seqlens_k, torch.int32),
        None,
        window,
        None,
        scale,
        rows(grad_output),
    )
    for name in needs_grad:
        tensor = getattr(made, name)
        if tensor is not None:
            tensor.requires_grad_()
    return made


def with_leaves(inputs: Inputs, **fields: object) -> Inputs:
    """``inputs`` with some fields replaced and fresh leaves for its gradients."""
    changed = inputs._replace(**fields)
    fresh = {}
    for name in GRADIENT_INPUTS:
        tensor, before = getattr(changed, name), getattr(inputs, name)
        if tensor is not None:
            fresh[name] = tensor.detach().clone().requires_grad_(before.requires_grad)
    return changed._replace(**fresh)


def randn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal fp32 tensors drawn one after the other from one seed, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def unit(*shape: int, at: int = 0) -> Tensor:
    """``[*shape]`` rows that are the unit vector ``e_at`` of the last dimension."""
    rows = torch.zeros(*shape, dtype=torch.float64)
    rows[..., at] = 1
    return rows


def near(what: str, found: Tensor | None, wanted: object, tolerance: float) -> Iterator[str]:
    """A message unless ``max |found - wanted| <= tolerance * max |wanted|`` (1 if that is 0)."""
    if found is None:
        yield f"{what} is missing"
        return
    target = torch.as_tensor(wanted, dtype=torch.float64).to(found.device).expand(found.shape)
    if not found.numel():
        return
    size = float(target.abs().max()) or 1.0
    error = float((found.detach().double() - target).abs().max())
    if not error <= tolerance * size:
        yield f"{what} is off by {error:.3g}, allowed {tolerance * size:.3g}"


def lse_near(what: str, found: Tensor, wanted: object, tolerance: float = LSE_TOLERANCE):
    """A message unless lse is absolutely near; infinities must be equal."""
    target = torch.as_tensor(wanted, dtype=torch.float64).to(found.device).expand(found.shape)
    got = found.detach().double()
    infinite = target.isinf()
    if not torch.equal(got[infinite], target[infinite]):
        yield f"{what}: infinite lse differs"
    error = (got - target)[~infinite].abs()
    if error.numel() and not float(error.max()) <= tolerance:
        yield f"{what} is off by {float(error.max()):.3g}, allowed {tolerance:.3g}"


def exact(what: str, found: Tensor | None, wanted: object) -> Iterator[str]:
    """A message unless every element is equal to ``wanted``, bit for bit (-0 equals 0)."""
    if found is None:
        yield f"{what} is missing"
        return
    target = torch.as_tensor(wanted).to(device=found.device, dtype=found.dtype)
    if not torch.equal(found.detach(), target.expand(found.shape)):
        yield f"{what} is not exact"


def agree(
    what: str, dtype: str, found: Outcome, wanted: Outcome, *, kv: bool = True
) -> Iterator[str]:
    """Messages unless two outcomes agree within the tolerances; ``kv`` includes KV gradients."""
    tolerance = TOLERANCE[dtype]
    yield from near(f"{what} output", found.output, wanted.output, tolerance)
    yield from lse_near(f"{what} lse", found.lse, wanted.lse)
    skipped = () if kv else ("local_kv", "sparse_kv")
    for name, one, other in zip(GRADIENT_INPUTS, found.gradients, wanted.gradients, strict=True):
        if other is not None and name not in skipped:
            yield from near(f"{what} gradient of {name}", one, other, 2 * tolerance)


def document(inputs: Inputs, number: int) -> Inputs:
    """One document of a packed call as a call of its own, with fresh leaves."""
    assert inputs.cu_seqlens is not None
    low, high = inputs.cu_seqlens[number : number + 2].tolist()
    fields: dict[str, object] = {
        name: getattr(inputs, name)[:, :, low:high]
        for name in ("query", "local_kv", "grad_output")
    }
    if inputs.cu_seqlens_k is not None and inputs.sparse_kv is not None:
        first, last = inputs.cu_seqlens_k[number : number + 2].tolist()
        fields["sparse_kv"] = inputs.sparse_kv[:, :, first:last]
    if inputs.kv_indices is not None:
        fields["kv_indices"] = inputs.kv_indices[:, low:high]
    return with_leaves(inputs, **fields, cu_seqlens=None, cu_seqlens_k=None)


def document_agrees(
    what: str, dtype: str, packed: Inputs, whole: Outcome, number: int, alone: Outcome
) -> Iterator[str]:
    """Messages unless document ``number`` of a packed outcome equals its outcome alone.

    The sink's gradient is a sum over documents and is left out.
    """
    assert packed.cu_seqlens is not None
    low, high = packed.cu_seqlens[number : number + 2].tolist()
    gradients = whole.gradients
    pool = gradients.sparse_kv
    if pool is not None and packed.cu_seqlens_k is not None:
        first, last = packed.cu_seqlens_k[number : number + 2].tolist()
        pool = pool[:, :, first:last]

    def span(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:, :, low:high]

    part = Outcome(
        whole.output[:, :, low:high],
        whole.lse[:, :, low:high],
        gradients._replace(
            query=span(gradients.query),
            local_kv=span(gradients.local_kv),
            sparse_kv=pool,
            attention_sink=None,
        ),
    )
    yield from agree(
        what, dtype, part, alone._replace(gradients=alone.gradients._replace(attention_sink=None))
    )
