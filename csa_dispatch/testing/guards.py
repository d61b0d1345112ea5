"""Guards around a backend: canaries about every input, and NaN in memory it did not write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .check import bits

_MARGIN = 256
"""Canary elements on either side of a tensor; keeps its alignment whatever its dtype."""

_SLOT_CANARY = 1
"""Integers about index tables are a slot that is likely valid: reading one changes the result."""


@dataclass(frozen=True)
class Guard:
    """One tensor inside a larger storage.

    Attributes:
        tensor: values and strides of the original. What lies between its elements is canary too.
        storage: all of it, one-dimensional.
        inside: bool, where ``tensor`` has elements.
        before: copy of ``storage``.
        version: autograd's count of in-place writes when the guard was set up.
    """

    tensor: Tensor
    storage: Tensor
    inside: Tensor
    before: Tensor
    version: int

    @classmethod
    def around(cls, tensor: Tensor) -> Guard:
        """Copy a tensor of any strides into a storage of its own."""
        start = _MARGIN + int(tensor.storage_offset()) % 16
        offsets = torch.full(tensor.shape, start, device=tensor.device)
        for dimension, (size, stride) in enumerate(
            zip(tensor.shape, tensor.stride(), strict=True)
        ):
            along = torch.arange(size, device=tensor.device) * stride
            offsets += along.reshape(-1, *(1,) * (tensor.dim() - dimension - 1))
        extent = int(offsets.max()) + 1 if tensor.numel() else start
        canary = float("nan") if tensor.is_floating_point() else _SLOT_CANARY
        storage = tensor.new_full((extent + _MARGIN,), canary, requires_grad=False)
        storage[offsets.flatten()] = tensor.detach().flatten()
        inside = torch.zeros_like(storage, dtype=torch.bool)
        inside[offsets.flatten()] = True
        view = storage.as_strided(tensor.shape, tensor.stride(), start)
        view.requires_grad_(tensor.requires_grad)
        return cls(view, storage, inside, storage.clone(), view._version)

    def modified(self) -> bool:
        """Whether an element was written, even with the value it had."""
        return self.tensor._version != self.version or bool((self._changed() & self.inside).any())

    def overrun(self) -> bool:
        """Whether memory beside the tensor's elements was written."""
        return bool((self._changed() & ~self.inside).any())

    def _changed(self) -> Tensor:
        """Elements of the storage that differ in any bit, ``[N]`` bool."""
        size = self.storage.element_size()
        differ = bits(self.storage) != bits(self.before)
        return differ.reshape(-1, size).any(-1)


Tensors = TypeVar("Tensors", bound=Any)
"""A NamedTuple of which some fields are tensors."""


def guard_inputs(inputs: Tensors) -> tuple[Tensors, dict[str, Guard]]:
    """``inputs`` with every tensor guarded, and the guards by name."""
    guards = {
        name: Guard.around(value)
        for name, value in inputs._asdict().items()
        if isinstance(value, Tensor)
    }
    tensors = {name: guard.tensor for name, guard in guards.items()}
    return inputs._replace(**tensors), guards


def shared_memory(results: dict[str, Tensor | None], guards: dict[str, Guard]) -> Iterator[str]:
    """Names of results that lie in an input's storage, as ``"dquery in grad_output"``."""
    owners = {guard.storage.untyped_storage().data_ptr(): name for name, guard in guards.items()}
    for name, result in results.items():
        if result is not None and result.numel():
            owner = owners.get(result.untyped_storage().data_ptr())
            if owner is not None:
                yield f"{name} in {owner}"


_ATEN = torch.ops.aten
_UNINITIALISED = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_permuted.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)


class NanInNewMemory(TorchDispatchMode):
    """In the block, memory that torch hands out uninitialised is NaN, or the largest integer.

    ``torch.utils.deterministic.fill_uninitialized_memory`` does so under deterministic
    algorithms alone, which change what runs; this does in any mode.
    """

    supports_higher_order_operators = True  # such as FlexAttention's; they pass through

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and not result.is_meta:
            if result.is_floating_point():
                result.fill_(float("nan"))
            elif result.dtype != torch.bool and not result.is_complex():
                result.fill_(torch.iinfo(result.dtype).max)
        return result
