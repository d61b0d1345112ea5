"""Which of the kernels run a call: Hopper's where they take it, else the portable ones."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType
from typing import Protocol

from torch import Tensor

from csa_dispatch.call import Call, Gradients, TokenBounds
from csa_dispatch.call_spec import CallSpec

from .interpreter import is_interpreted


class Forward(Protocol):
    """Output like the query and lse ``[B, H, T]`` fp32."""

    def __call__(self, call: Call, bounds: TokenBounds | None) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """Gradients asked for by ``needs``, in a fixed order of sums when ``deterministic``."""

    def __call__(
        self,
        call: Call,
        bounds: TokenBounds | None,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
        deterministic: bool,
    ) -> Gradients: ...


@lru_cache
def _hopper() -> ModuleType | None:
    """The warp-specialised kernels, where they are installed and can be compiled."""
    if is_interpreted() or importlib.util.find_spec(f"{__package__}.hopper") is None:
        return None
    return importlib.import_module(f"{__package__}.hopper")


def on_hopper(spec: CallSpec) -> bool:
    """Whether the warp-specialised kernels run the forward or the backward of such calls."""
    hopper = _hopper()
    return hopper is not None and (
        hopper.supports_forward(spec) or (spec.differentiable and hopper.supports_backward(spec))
    )


def forward_of(spec: CallSpec) -> Forward:
    """The forward for such calls."""
    hopper = _hopper()
    if hopper is not None and hopper.supports_forward(spec):
        return hopper.forward
    from .portable_forward import forward

    return forward


def backward_of(spec: CallSpec) -> Backward:
    """The backward for such calls; ``spec.needs_grad`` counts."""
    hopper = _hopper()
    if hopper is not None and hopper.supports_backward(spec):
        return hopper.backward
    from .portable_backward import backward

    return backward
