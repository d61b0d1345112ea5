"""Targets: what every result of a call must equal, and the epsilon terms of its budget.

``budgets`` states the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients

from .budgets import Target, frobenius, largest
from .magnitudes import Magnitudes, magnitudes
from .oracle import oracle_forward, oracle_gradients, visible_rows
from .plain import accumulation_dtype, plain_forward, plain_gradients


class Unused(NamedTuple):
    """Where the definition makes results exactly 0, broadcastable to them.

    Attributes:
        output: rows that see no key and heads whose sink is +inf, ``[B, H, T, 1]``; of the
            query's gradient too.
        local, pool: KV rows nobody sees, ``[B, 1, T, 1]`` and ``[B, 1, S, 1]``.
        sink: heads ``[H]`` whose sink is infinite.
    """

    output: Tensor
    local: Tensor
    pool: Tensor
    sink: Tensor


class Exact(NamedTuple):
    """A call's results in float64, however they were come by; ``targets_from`` budgets them.

    Attributes:
        output, lse: as ``oracle_forward``.
        gradients: as ``oracle_gradients``; None when the call asks for none.
        sizes: as ``magnitudes``.
        unused: where results are exactly 0.
    """

    output: Tensor
    lse: Tensor
    gradients: Gradients | None
    sizes: Magnitudes
    unused: Unused


def targets(call: Call, grad_output: Tensor, *, gradients: bool = True) -> dict[str, Target]:
    """What every result of ``call`` must equal, by name, with its budget.

    Args:
        call: the call; its tensors are read at their own (quantised) dtype.
        grad_output: ``[B, H, T, D]`` upstream gradient.
        gradients: False leaves the gradients out.
    """
    exact = oracle_gradients(call, grad_output) if gradients else None
    sizes = magnitudes(call, grad_output)
    return targets_from(
        call, grad_output, Exact(*oracle_forward(call), exact, sizes, unused_parts(call))
    )


def targets_from(call: Call, grad_output: Tensor, exact: Exact) -> dict[str, Target]:
    """Targets and budgets around results that are already known in float64."""
    sizes, unused = exact.sizes, exact.unused
    plain_output, plain_lse = plain_forward(call)
    found = {
        "output": _target(
            call,
            sizes,
            "output",
            "query",
            exact.output,
            plain_output,
            unused.output,
            sizes.output,
            0,
        ),
        "lse": _lse_target(call, sizes, exact.lse, plain_lse),
    }
    if exact.gradients is None:
        return found
    plain = plain_gradients(call, grad_output)
    batch, heads, tokens, _ = call.query.shape
    shared = heads // call.local_kv.shape[1]
    window = min(call.sliding_window_size, tokens)
    table = (
        ("dquery", "query", unused.output, 0),
        ("dlocal_kv", "local_kv", unused.local, window * shared),
        ("dsparse_kv", "sparse_kv", unused.pool, tokens * shared),
        ("dsink", "attention_sink", unused.sink, batch * tokens),
    )
    for name, field, zero, hits in table:
        value, yardstick = getattr(exact.gradients, field), getattr(plain, field)
        if value is not None:
            size = getattr(sizes, field)
            found[name] = _target(call, sizes, name, field, value, yardstick, zero, size, hits)
    return found


def _target(
    call: Call,
    sizes: Magnitudes,
    name: str,
    field: str,
    value: Tensor,
    plain: Tensor,
    zero: Tensor,
    terms: Tensor,
    hits: int,
) -> Target:
    """The target of the tensor that has the dtype of the call's ``field``."""
    dtype = getattr(call, field).dtype
    rounding = _roundoff(call.query.dtype)
    fine = _roundoff(accumulation_dtype(call.query.dtype))
    summing = fine * math.sqrt(hits)
    exponent = fine * (1 + sizes.logit) * math.sqrt(_reduction(call)) + summing
    finite = value.isfinite() & terms.isfinite()
    terms = torch.where(finite, terms, 0.0)
    reference = torch.where(finite, value, 0.0).abs().clamp(min=torch.finfo(dtype).tiny)
    tail = 1 + 2 / math.sqrt(max(1, value.numel()))

    def epsilon(norm: Callable[[Tensor], float], factor: float) -> float:
        spread = (factor * rounding + exponent) * norm(terms)
        return (_roundoff(dtype) + summing) * norm(reference) + spread

    return Target(
        name, dtype, value, plain, zero, epsilon(frobenius, tail), epsilon(largest, tail + 1)
    )


def _lse_target(call: Call, sizes: Magnitudes, value: Tensor, plain: Tensor) -> Target:
    exact = accumulation_dtype(call.query.dtype)
    bound = _roundoff(exact) * (1 + sizes.logit) * math.sqrt(_reduction(call))
    never = torch.zeros((), dtype=torch.bool, device=value.device)
    spread = bound * math.sqrt(value.numel())
    return Target("lse", exact, value, plain, never, spread, bound, relative=False)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _reduction(call: Call) -> int:
    """``n``: terms of a dot product plus terms of a softmax."""
    tokens, head_dim = call.query.shape[2:]
    keys = min(call.sliding_window_size, tokens)
    if call.kv_indices is not None:
        keys += call.kv_indices.shape[-1]
    elif call.sparse_kv is not None:
        keys += call.sparse_kv.shape[2]
    return head_dim + keys


def unused_parts(call: Call) -> Unused:
    """Where results of ``call`` are exactly 0, by the oracle's own list of visible rows."""
    batch, heads, tokens, _ = call.query.shape
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    empty = torch.ones(batch, tokens, dtype=torch.bool)
    local = torch.ones(batch, tokens, dtype=torch.bool)
    sparse = torch.ones(batch, pool, dtype=torch.bool)
    for b, rows in enumerate(visible_rows(call)):
        for t, row in enumerate(rows):
            empty[b, t] = not row.local and not row.pool
        local[b, [j for row in rows for j in row.local]] = False
        sparse[b, [j for row in rows for j in row.pool]] = False
    device = call.query.device
    sink = call.attention_sink
    logit = torch.zeros(heads, device=device) if sink is None else sink.detach()
    takes_all = (logit == math.inf)[None, :, None]
    return Unused(
        (empty.to(device)[:, None] | takes_all)[..., None],
        local.to(device)[:, None, :, None],
        sparse.to(device)[:, None, :, None],
        logit.isinf(),
    )
