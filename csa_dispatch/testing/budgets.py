"""Error budgets: how far a result may lie from the oracle, instead of copied tolerances.

For the same quantised inputs let ``r`` be the float64 oracle's tensor, ``e_plain`` the error of
plain eager PyTorch, and ``m`` the elementwise size of the terms behind ``r`` (``magnitudes``). A
backend's error must satisfy, in the Frobenius norm and in the largest element alike::

    |a - r| <= 2 |e_plain| + u (|r| + c |m|) + u32 ((1 + z) sqrt(n) + sqrt(h)) |m|

- ``u`` is the unit roundoff of the query's dtype, ``eps / 2``: one rounding of the result (at the
  sink's dtype for dsink), one of the probabilities or their derivative before a product.
- ``c`` is ``1 + 2 / sqrt(N)`` for the Frobenius norm of ``N`` elements and 1 more for the largest
  one: a sum of independent roundings is normal with a standard deviation of about 0.4 ``u |m|``,
  so this stands four deviations off in either norm, for one element and for a million.
- ``u32`` is the unit roundoff of the accumulation dtype (fp32; fp64 for fp64 inputs).
- ``n = D + W + K`` is the reduction length of scores and softmax and ``z`` the largest logit or
  lse: the error of a recomputed ``exp(score - lse)`` relative to itself, ``sqrt`` because rounding
  errors are independent.
- ``h`` is the number of rows and heads that add up in one element of dkv or dsink.

The share of budget used is the left side over the right; above 1 fails. lse is compared
absolutely: ``|a - r| <= 2 e_plain + u32 ((1 + z) sqrt(n))`` in the largest element.

Besides: NaN and Inf must stand in exactly the same places, and what the definition makes exactly
zero (gradients of rows nobody sees, rows that see nothing) must be exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients

from .magnitudes import Magnitudes, magnitudes
from .oracle import oracle_forward, oracle_gradients, visible_rows
from .plain import accumulation_dtype, plain_forward, plain_gradients

PLAIN_MULTIPLE = 2.0
"""How many times plain eager PyTorch's own error a backend may make, before epsilon terms."""


class TensorVerdict(NamedTuple):
    """How one tensor compares with the oracle.

    Attributes:
        name: output, lse, dquery, dlocal_kv, dsparse_kv or dsink.
        share: largest share of budget used, over both norms; inf for a wrong NaN mask, shape
            or exact zero.
        error: relative Frobenius error (absolute for lse); the absolute error where the
            reference is 0.
        plain_error: plain eager PyTorch's error in the same measure.
        message: what is wrong, empty when the tensor is within its budget.
    """

    name: str
    share: float
    error: float
    plain_error: float
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.message


class Target(NamedTuple):
    """What one tensor must equal, and how nearly.

    Attributes:
        name: the tensor's name, as in ``TensorVerdict``.
        dtype: the dtype it must have.
        value: the oracle's float64 tensor.
        plain: plain eager PyTorch's tensor.
        zero: bool, broadcastable to ``value``: where it must be exactly zero.
        epsilon_frobenius, epsilon_max: the epsilon terms of the budget, absolute.
        relative: whether errors are reported relative to the reference.
    """

    name: str
    dtype: torch.dtype
    value: Tensor
    plain: Tensor
    zero: Tensor
    epsilon_frobenius: float
    epsilon_max: float
    relative: bool = True


def judge(target: Target, actual: Tensor) -> TensorVerdict:
    """Compare one tensor of a backend with its target."""
    reference = target.value
    if actual.shape != reference.shape or actual.dtype != target.dtype:
        return _failed(
            target,
            f"is {actual.dtype} {tuple(actual.shape)}, "
            f"expected {target.dtype} {tuple(reference.shape)}",
        )
    found = actual.detach().double()
    finite = reference.isfinite()
    special = torch.where(finite, 0.0, reference)
    same = torch.equal(
        torch.where(found.isfinite(), 0.0, found).nan_to_num(7.0, 8.0, -8.0),
        special.nan_to_num(7.0, 8.0, -8.0),
    )
    if not same:
        wrong = int((found.isfinite() != finite).sum())
        return _failed(target, f"NaN or Inf in the wrong places ({wrong} of {found.numel()})")
    leaked = torch.where(target.zero, found, 0.0).abs()
    if bool((leaked > 0).any()):
        return _failed(target, f"must be exactly 0 where unused, is up to {leaked.max():.3g}")

    error = torch.where(finite, found - reference, 0.0)
    plain = torch.where(finite, target.plain.detach().double() - reference, 0.0).nan_to_num(0.0)
    size = torch.where(finite, reference, 0.0)
    measures = (
        ("Frobenius", _frobenius, target.epsilon_frobenius),
        ("max", _largest, target.epsilon_max),
    )
    share, messages = 0.0, []
    for label, norm, epsilon in measures:
        allowed = PLAIN_MULTIPLE * norm(plain) + epsilon
        made = norm(error)
        used = made / allowed if allowed > 0 else (0.0 if made == 0 else math.inf)
        share = max(share, used)
        if used > 1:
            unit = _unit(target, norm(size))
            messages.append(f"{label} error {made / unit:.3g}, allowed {allowed / unit:.3g}")
    measure = _frobenius if target.relative else _largest
    unit = _unit(target, measure(size))
    return TensorVerdict(
        target.name, share, measure(error) / unit, measure(plain) / unit, "; ".join(messages)
    )


def _unit(target: Target, size: float) -> float:
    """What errors are reported relative to: 1 for lse and for references of pure rounding."""
    return size if target.relative and size > target.epsilon_frobenius else 1.0


def _failed(target: Target, message: str) -> TensorVerdict:
    return TensorVerdict(target.name, math.inf, math.inf, 0.0, message)


def _frobenius(tensor: Tensor) -> float:
    return float(tensor.norm())


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def targets(call: Call, grad_output: Tensor, *, gradients: bool = True) -> dict[str, Target]:
    """What every result of ``call`` must equal, by name, with its budget.

    Args:
        call: the call; its tensors are read at their own (quantised) dtype.
        grad_output: ``[B, H, T, D]`` upstream gradient.
        gradients: False leaves the gradients out.
    """
    sizes = magnitudes(call, grad_output)
    plain_out, plain_lse = plain_forward(call)
    output, lse = oracle_forward(call)
    empty = _empty_rows(call)
    dead = _takes_all(call)
    blank = (empty[:, None] | dead[None])[..., None]
    found = {
        "output": _target("output", call, call.query.dtype, output, plain_out, blank, sizes.output, sizes, 0),
        "lse": _lse_target(call, lse, plain_lse, sizes),
    }
    if gradients:
        found |= _gradient_targets(call, grad_output, blank, sizes)
    return found


def _gradient_targets(
    call: Call, grad_output: Tensor, blank: Tensor, sizes: Magnitudes
) -> dict[str, Target]:
    exact = oracle_gradients(call, grad_output)
    plain = plain_gradients(call, grad_output)
    local_unseen, pool_unseen = _unseen_rows(call)
    batch, heads, tokens, _ = call.query.shape
    shared = heads // call.local_kv.shape[1]
    window_hits = min(call.sliding_window_size, tokens) * shared
    names = (
        ("dquery", "query", blank, 0),
        ("dlocal_kv", "local_kv", local_unseen[:, None, :, None], window_hits),
        ("dsparse_kv", "sparse_kv", pool_unseen[:, None, :, None], tokens * shared),
        ("dsink", "attention_sink", _infinite_sink(call), batch * tokens),
    )
    found = {}
    for name, field, zero, hits in names:
        value = getattr(exact, field)
        if value is not None:
            size = getattr(sizes, field)
            dtype = getattr(call, field).dtype
            yardstick = getattr(plain, field)
            found[name] = _target(name, call, dtype, value, yardstick, zero, size, sizes, hits)
    return found


def _target(
    name: str,
    call: Call,
    dtype: torch.dtype,
    value: Tensor,
    plain: Tensor,
    zero: Tensor,
    size: Tensor,
    sizes: Magnitudes,
    hits: int,
) -> Target:
    rounding, fine = _roundoff(call.query.dtype), _roundoff(accumulation_dtype(call.query.dtype))
    finite = value.isfinite() & size.isfinite()
    reference, terms = torch.where(finite, value, 0.0), torch.where(finite, size, 0.0)
    reference = reference.abs().clamp(min=torch.finfo(dtype).tiny)
    exponent = fine * ((1 + sizes.logit) * math.sqrt(_reduction(call)) + math.sqrt(hits))

    tail = 1 + 2 / math.sqrt(max(1, value.numel()))

    def epsilon(norm: Callable[[Tensor], float], factor: float) -> float:
        terms_error = (factor * rounding + exponent) * norm(terms)
        return _roundoff(dtype) * norm(reference) + terms_error

    return Target(
        name, dtype, value, plain, zero, epsilon(_frobenius, tail), epsilon(_largest, tail + 1)
    )


def _lse_target(call: Call, value: Tensor, plain: Tensor, sizes: Magnitudes) -> Target:
    exact = accumulation_dtype(call.query.dtype)
    bound = _roundoff(exact) * (1 + sizes.logit) * math.sqrt(_reduction(call))
    never = torch.zeros((), dtype=torch.bool, device=value.device)
    frobenius = bound * math.sqrt(value.numel())
    return Target("lse", exact, value, plain, never, frobenius, bound, relative=False)


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


def _takes_all(call: Call) -> Tensor:
    """Heads ``[H, 1]`` whose sink is +inf: they put out exactly 0."""
    if call.attention_sink is None:
        return torch.zeros(1, 1, dtype=torch.bool, device=call.query.device)
    return (call.attention_sink == math.inf)[:, None]


def _infinite_sink(call: Call) -> Tensor:
    """Heads ``[H]`` whose sink is -inf or +inf: its gradient is exactly 0."""
    if call.attention_sink is None:
        return torch.zeros(1, dtype=torch.bool, device=call.query.device)
    return call.attention_sink.isinf()


def _empty_rows(call: Call) -> Tensor:
    """Rows ``[B, T]`` that see no key."""
    empty = [[not row.local and not row.pool for row in rows] for rows in visible_rows(call)]
    shape = (call.query.shape[0], call.query.shape[2])
    return torch.tensor(empty, dtype=torch.bool, device=call.query.device).reshape(shape)


def _unseen_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Rows ``[B, T]`` of local_kv and ``[B, S]`` of sparse_kv that no query row sees."""
    batch, _, tokens, _ = call.local_kv.shape
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    local = torch.ones(batch, tokens, dtype=torch.bool)
    sparse = torch.ones(batch, pool, dtype=torch.bool)
    for b, rows in enumerate(visible_rows(call)):
        local[b, [j for row in rows for j in row.local]] = False
        sparse[b, [j for row in rows for j in row.pool]] = False
    return local.to(call.query.device), sparse.to(call.query.device)


def gradient_tensors(gradients: Gradients) -> dict[str, Tensor | None]:
    """Gradients by the names of their targets."""
    return dict(zip(("dquery", "dlocal_kv", "dsparse_kv", "dsink"), gradients, strict=True))
