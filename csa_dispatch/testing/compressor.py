"""``compress_kv`` held to a float64 oracle: the definition, one entry at a time, and its budgets.

Nothing is shared with the backends, not even the table of blocks. A token that no entry pools is
never read. The budget of an element ``r`` with terms of size ``m`` is one rounding to the result's
dtype and what fp32 arithmetic (fp64 for fp64) may move it before that::

    |a - r| <= |round(r) - r| + 2 u32 ((1 + z) (4 + sqrt(k)) + sqrt(h)) m

``k`` slots of an entry, ``z`` the largest logit, ``h`` the entries that add up in an element of
dposition_bias, 4 for the spread of independent roundings. Weights that are rounded to bf16 on the
way, or a second rounding of the result, exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.compressor_call import CompressorCall
from csa_dispatch.functional import compress_kv

from .budgets import TensorVerdict
from .compressor_cases import CompressorInputs
from .plain import accumulation_dtype

NAMES = ("entries", "dvalues", "dgates", "dposition_bias")

CompressorResult = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Entries and the gradients of values, gates and position_bias; None where not asked for."""

Run = Callable[[CompressorInputs], CompressorResult]


class CompressorResults(NamedTuple):
    """Entries and gradients, or the sizes of their terms, float64 in the results' shapes."""

    entries: Tensor
    values: Tensor
    gates: Tensor
    position_bias: Tensor


class CompressorOracle(NamedTuple):
    """What a call must give.

    Attributes:
        exact: the results.
        sizes: elementwise sizes of the terms that add up to each.
        unused: bool, where each is exactly 0.
        logit: the largest ``|gate| + |bias|`` of a slot.
    """

    exact: CompressorResults
    sizes: CompressorResults
    unused: CompressorResults
    logit: float


class Slot(NamedTuple):
    """One token that an entry pools: which, which branch of it, its place in its block."""

    token: int
    branch: int
    place: int


def slots_of(call: CompressorCall) -> list[list[Slot]]:
    """The slots of each entry, on the host; spare rows have none."""
    offsets = [0, call.values.shape[1]]
    if call.cu_seqlens is not None:
        offsets = call.cu_seqlens.tolist()
    ratio = call.compress_ratio
    found: list[list[Slot]] = []
    for start, end in pairwise(offsets):
        for block in range((end - start) // ratio):
            first = start + block * ratio
            own = [Slot(first + j, int(call.overlapping), j) for j in range(ratio)]
            before = []
            if call.overlapping and block > 0:
                before = [Slot(first - ratio + j, 0, j) for j in range(ratio)]
            found.append(before + own)
    return found + [[] for _ in range(call.entries - len(found))]


class _Entry(NamedTuple):
    """One entry in float64: index of its slots ``[k]``, their values, logits and weights."""

    batch: int
    row: int
    token: Tensor
    branch: Tensor
    place: Tensor
    values: Tensor
    logits: Tensor
    weights: Tensor


def _entries(call: CompressorCall) -> Iterator[_Entry]:
    size, device = call.head_dim, call.values.device

    def take(tensor: Tensor, rows: Tensor, branch: Tensor) -> Tensor:
        by_branch = tensor.detach()[rows].double().unflatten(-1, (-1, size))
        return by_branch[torch.arange(len(rows), device=device), branch]

    for row, slots in enumerate(slots_of(call)):
        if not slots:
            continue
        token, branch, place = torch.tensor(slots, device=device).T
        bias = take(call.position_bias, place, branch)
        for batch in range(call.values.shape[0]):
            values = take(call.values[batch], token, branch)
            gates = take(call.gates[batch], token, branch)
            weights = (gates + bias).softmax(0)
            logits = gates.abs() + bias.abs()
            yield _Entry(batch, row, token, branch, place, values, logits, weights)


def compressor_oracle(call: CompressorCall, grad_entries: Tensor) -> CompressorOracle:
    """Entries and the gradients of ``sum(entries * grad_entries)``, by definition.

    With ``w`` the softmax of ``gate + bias`` over an entry's slots, a channel at a time::

        entry  = sum w value
        dvalue = w grad           dgate = w grad (value - entry)      dbias = sum dgate
    """
    batch, tokens, channels = call.values.shape
    device = call.values.device

    def blank(fill: float, dtype: torch.dtype = torch.float64) -> CompressorResults:
        shapes = (
            (batch, call.entries, call.head_dim),
            (batch, tokens, channels),
            (batch, tokens, channels),
            (call.compress_ratio, channels),
        )
        return CompressorResults(
            *(torch.full(shape, fill, dtype=dtype, device=device) for shape in shapes)
        )

    exact, sizes, unused = blank(0), blank(0), blank(True, torch.bool)
    by_branch = [
        CompressorResults(*(item.unflatten(-1, (-1, call.head_dim)) for item in results))
        for results in (exact, sizes, unused)
    ]
    logit = 0.0
    for entry in _entries(call):
        here, place = (entry.batch, entry.token, entry.branch), (entry.place, entry.branch)
        grad = grad_entries.detach()[entry.batch, entry.row].double()
        terms = entry.weights * entry.values
        pooled = terms.sum(0)
        of_values = entry.weights * grad
        of_gates = of_values * (entry.values - pooled)
        # A gate's gradient may be far smaller than what cancels in it.
        of_gates_size = of_values.abs() * (entry.values.abs() + terms.abs().sum(0))
        exact.entries[entry.batch, entry.row] = pooled
        sizes.entries[entry.batch, entry.row] = terms.abs().sum(0)
        unused.entries[entry.batch, entry.row] = False
        results, size, zero = by_branch
        results.values[here], size.values[here] = of_values, of_values.abs()
        results.gates[here], size.gates[here] = of_gates, of_gates_size
        results.position_bias[place] += of_gates
        size.position_bias[place] += of_gates_size.square()
        for item in (zero.values, zero.gates):
            item[here] = False
        zero.position_bias[place] = False
        logit = max(logit, float(entry.logits.nan_to_num(0, 0, 0).max()))
    sizes.position_bias.sqrt_()
    return CompressorOracle(exact, sizes, unused, logit)


def compressor_verdicts(
    call: CompressorCall, results: Sequence[Tensor | None], grad_entries: Tensor
) -> list[TensorVerdict]:
    """How each result compares with the oracle; none of a gradient that is None.

    A share is the largest of an element; inf for a wrong shape or dtype, NaN or Inf elsewhere
    than the oracle, or anything but 0 where no entry pools.

    Args:
        call: the call; its tensors are read at their own (quantised) dtype.
        results: entries, dvalues, dgates and dposition_bias.
        grad_entries: ``[B, T // r, D]`` upstream gradient.
    """
    oracle = compressor_oracle(call, grad_entries)
    fine = torch.finfo(accumulation_dtype(call.values.dtype)).eps / 2
    verdicts: list[TensorVerdict] = []
    for name, found, value, size, zero in zip(
        NAMES, results, oracle.exact, oracle.sizes, oracle.unused, strict=True
    ):
        if found is None:
            continue
        by_bias = name == "dposition_bias"
        dtype = (call.position_bias if by_bias else call.values).dtype
        hits = call.values.shape[0] * call.entries if by_bias else 0
        spread = (1 + oracle.logit) * (4 + math.sqrt(call.slots)) + math.sqrt(hits)
        share = error = math.inf
        if found.shape == value.shape and found.dtype == dtype:
            share = _share(found.detach(), value, 2 * fine * spread * size, zero)
            error = _relative_error(found.detach(), value)
        message = "" if share <= 1 else f"uses {share:.3g} times its budget"
        if share == math.inf:
            message = f"is wrong: {found.dtype} {list(found.shape)}, or NaN or not 0 in places"
        verdicts.append(TensorVerdict(name, share, error, 0.0, message))
    return verdicts


def compressor_shares(
    call: CompressorCall, results: Sequence[Tensor], grad_entries: Tensor
) -> dict[str, float]:
    """Share of its budget that each result uses, by name; see ``compressor_verdicts``."""
    return {item.name: item.share for item in compressor_verdicts(call, results, grad_entries)}


def _relative_error(found: Tensor, value: Tensor) -> float:
    """In the Frobenius norm, where the oracle is finite."""
    finite = value.isfinite()
    size = float(value[finite].norm())
    error = float((found.double() - value)[finite].norm())
    return error / size if size else error


def compressor_run(backend: str | None) -> Run:
    """``compress_kv`` forced to a backend, with the gradients asked for, on a case's inputs."""

    def run(inputs: CompressorInputs) -> CompressorResult:
        call, grad_entries, needs = inputs
        leaves = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(call[:3], needs, strict=True)
        ]
        entries = compress_kv(
            leaves[0],
            leaves[1],
            leaves[2],
            call.compress_ratio,
            overlapping=call.overlapping,
            cu_seqlens=call.cu_seqlens,
            backend=backend,
        ).entries
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(entries, wanted, grad_entries) if wanted else ())
        values, gates, bias = (next(found) if need else None for need in needs)
        return entries.detach(), values, gates, bias

    return run


def _share(found: Tensor, value: Tensor, budget: Tensor, zero: Tensor) -> float:
    rounded = value.to(found.dtype).double()
    actual, special = found.double(), ~rounded.isfinite()
    if not torch.equal(
        actual[special].nan_to_num(7, 8, -8), rounded[special].nan_to_num(7, 8, -8)
    ):
        return math.inf
    if not bool(actual[~special].isfinite().all()) or bool((actual[zero] != 0).any()):
        return math.inf
    excess = (actual - value).abs() - (rounded - value).abs()
    excess = excess.masked_fill(special, 0).clamp(min=0)
    used = torch.where(excess > 0, excess / budget, 0.0)
    return float(used.max()) if used.numel() else 0.0
