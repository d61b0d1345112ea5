"""Memo: the calls a Plan has prepared, and a guard that recognises the last of them cheaply.

A signature takes some thirty attribute reads in Python, most of what a Plan adds to a call. A
guard has torch's own C++ compare the same properties of all tensors at once, as torch.compile
does before it enters a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .prepared import Arguments, Prepared, signature, situation
from .runner import CACHE_SIZE

# Not public; where a torch has no such type, every call takes the signature's way.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)
_nested = attrgetter("is_nested")


class Guard(NamedTuple):
    """Recognises calls whose signature is that of the call it was made from.

    It may miss one, as when an equal scale is another object; it never takes one for another.
    """

    absent: tuple[bool, ...]
    present: Callable[[Arguments], tuple[Tensor, ...]]
    check_tensors: Callable[..., bool]
    situation: tuple[object, ...]
    window: int
    ratio: int | None
    scale: float | None
    layout: str
    prepared: Prepared

    @staticmethod
    def of(arguments: Arguments, prepared: Prepared) -> Guard:
        """A guard for a plain, prepared call."""
        present = itemgetter(*[i for i in range(8) if arguments[i] is not None])
        tensors = present(arguments)
        # Numbers in every place: None there would let any size or stride pass.
        known = _TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        return Guard(
            _absent(arguments),
            present,
            known.check,
            situation(arguments),
            *arguments[8:],
            prepared,
        )

    def matches(self, arguments: Arguments) -> bool:
        """Whether these arguments are such a call's; anything at all may be asked about."""
        tensors = self.present(arguments)
        try:
            # Scalars by identity: True == 1 == 1.0, but they are different arguments.
            return (
                arguments.sliding_window_size is self.window
                and arguments.compress_ratio is self.ratio
                and arguments.scale is self.scale
                and arguments.layout is self.layout
                and _absent(arguments) == self.absent
                # Torch would ask a nested tensor for its strides, and abort the process.
                and True not in map(_nested, tensors)
                and self.check_tensors(*tensors)
                and situation(arguments) == self.situation
            )
        except AttributeError:
            return False  # of what is no tensor


def _absent(arguments: Arguments) -> tuple[bool, ...]:
    """Which of the optional tensors are None."""
    _, _, sparse_kv, kv_indices, sink, cu_seqlens, cu_seqlens_k, doc_ids, *_ = arguments
    return (
        sparse_kv is None,
        kv_indices is None,
        sink is None,
        cu_seqlens is None,
        cu_seqlens_k is None,
        doc_ids is None,
    )


class Memo:
    """Prepared calls by signature; the one seen twice in a row gets a guard."""

    __slots__ = ("_entries", "_guard", "_last")

    def __init__(self) -> None:
        self._entries: dict[object, Prepared] = {}
        self._last: Prepared | None = None
        self._guard: Guard | None = None

    def recall(self, arguments: Arguments) -> Prepared | None:
        """The guarded call's Prepared if this is such a call again.

        For calls in eager mode without dispatch modes or transforms: see ``undisturbed``.
        """
        guard = self._guard
        return guard.prepared if guard is not None and guard.matches(arguments) else None

    def find(self, arguments: Arguments) -> tuple[object, Prepared | None]:
        """The signature of a plain call, and what it was prepared to if it was seen before.

        Raises:
            TypeError, RuntimeError: a bad argument has no signature; validation says which.
        """
        key = signature(arguments)
        prepared = self._entries.get(key)
        if prepared is not None and prepared is self._last and _TensorGuards is not None:
            self._guard = Guard.of(arguments, prepared)
        self._last = prepared
        return key, prepared

    def keep(self, key: object, prepared: Prepared) -> None:
        """Remember what a signature was prepared to."""
        if len(self._entries) >= CACHE_SIZE:
            self._entries.clear()
        self._entries[key] = prepared
