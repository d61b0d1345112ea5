"""Error budgets: how far a result may lie from the oracle, instead of copied tolerances.

For the same quantised inputs let ``r`` be the float64 oracle's tensor, ``e_plain`` the error of
plain eager PyTorch, and ``m`` the elementwise size of the terms behind ``r`` (``magnitudes``). A
backend's error must satisfy, in the Frobenius norm and in the largest element alike::

    |a - r| <= 2 |e_plain| + u (|r| + c |m|) + u32 ((1 + z) sqrt(n) |m| + sqrt(h) (|m| + |r|))

- ``u`` is the unit roundoff of the query's dtype, ``eps / 2``: one rounding of the result (at the
  sink's dtype for dsink), one of the probabilities or their derivative before a product.
- ``c`` is ``1 + 2 / sqrt(N)`` for the Frobenius norm of ``N`` elements and 1 more for the largest
  one: a sum of independent roundings is normal with a standard deviation of about 0.4 ``u |m|``,
  so this stands four deviations off in either norm, for one element and for a million.
- ``u32`` is the unit roundoff of the accumulation dtype (fp32; fp64 for fp64 inputs).
- ``n = D + W + K`` is the reduction length of scores and softmax and ``z`` the largest logit or
  lse: the error of a recomputed ``exp(score - lse)`` relative to itself, ``sqrt`` because rounding
  errors are independent.
- ``h`` is the number of rows and heads that add up in one element of dkv or dsink. Every partial
  sum is rounded; they grow to ``|m|`` where terms differ in sign, and to ``|r|`` where not, as
  when one upstream gradient is expanded over all heads.

The share of budget used is the left side over the right; above 1 fails. lse is compared
absolutely: ``|a - r| <= 2 e_plain + u32 ((1 + z) sqrt(n))`` in the largest element.

Besides: NaN and Inf must stand in exactly the same places, and what the definition makes exactly
zero (gradients of rows nobody sees, rows that see nothing) must be exactly zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Gradients

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
        ("Frobenius", frobenius, target.epsilon_frobenius),
        ("max", largest, target.epsilon_max),
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
    measure = frobenius if target.relative else largest
    unit = _unit(target, measure(size))
    return TensorVerdict(
        target.name, share, measure(error) / unit, measure(plain) / unit, "; ".join(messages)
    )


def _unit(target: Target, size: float) -> float:
    """What errors are reported relative to: 1 for lse and for references of pure rounding."""
    return size if target.relative and size > target.epsilon_frobenius else 1.0


def _failed(target: Target, message: str) -> TensorVerdict:
    return TensorVerdict(target.name, math.inf, math.inf, 0.0, message)


def frobenius(tensor: Tensor) -> float:
    """Root of the sum of squares."""
    return float(tensor.norm())


def largest(tensor: Tensor) -> float:
    """Largest absolute value, 0 for an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def gradient_tensors(gradients: Gradients) -> dict[str, Tensor | None]:
    """Gradients by the names of their targets."""
    return dict(zip(("dquery", "dlocal_kv", "dsparse_kv", "dsink"), gradients, strict=True))
