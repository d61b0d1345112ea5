"""What may surround a call: autocast, and transforms that cannot apply to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .tracing import constant_when_traced

_functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_functorch_level = _functorch.peek_interpreter_stack
any_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportAttributeAccessIssue]
_REFUSED = {
    "Grad": "torch.func.grad, vjp and jacrev",
    "Jvp": "torch.func.jvp and jacfwd",
}
_OF_OPERATORS = {"Vmap": "torch.vmap", "Functionalize": "torch.func.functionalize"}

_NOTHING = nullcontext()


def outside_autocast(device_type: str) -> AbstractContextManager[object]:
    """A block in which autocast is off: a backend's fp32 accumulation stays in fp32.

    ``attention()`` has cast the inputs by then; what a backend computes is its own affair.
    """
    if not any_autocast() or not torch.amp.is_autocast_available(device_type):
        return _NOTHING
    return torch.autocast(device_type, enabled=False)


def transforms_active() -> bool:
    """Whether a torch.func transform or forward-mode AD surrounds the call."""
    return _functorch_level() is not None or forward_ad._current_level >= 0


@constant_when_traced
def _refused(mapped: bool) -> str | None:
    """The transform around a call that cannot apply to it; ``mapped`` as in the next one."""
    refused = _REFUSED if mapped else _REFUSED | _OF_OPERATORS
    for level in reversed(_functorch.get_interpreter_stack() or ()):
        name = refused.get(str(level.key()).rpartition(".")[2])
        if name is not None:
            return name
    return "forward-mode AD" if forward_ad._current_level >= 0 else None


def is_mapped(tensor: Tensor) -> bool:
    """Whether ``torch.vmap`` or ``is_grads_batched=True`` hides a dimension of the tensor."""
    return _functorch.is_legacy_batchedtensor(tensor) or _functorch.is_batchedtensor(tensor)


def refuse_transforms(operation: str = "attention", *, mapped: bool = True) -> None:
    """Raise for the transforms whose result would be wrong or an obscure error.

    Args:
        operation: the function's name, for the message.
        mapped: whether ``torch.vmap`` and ``functionalize`` apply, as they do to an operator,
            which ``vmap`` runs once per mapped element.

    Raises:
        NotImplementedError: inside torch.func.grad/vjp/jvp or forward-mode AD.
    """
    name = _refused(mapped)
    if name is not None:
        raise NotImplementedError(
            f"{operation}() is inside {name}, which it does not support; it is differentiable by "
            "torch.autograd (backward, grad), also under torch.compile."
        )
