"""Receipts: what really ran, forward and backward, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .spec import Spec


class Receipt(NamedTuple):
    """One run of one direction of one backend; ``spec`` is a CallSpec for attention."""

    direction: str
    backend: str
    spec: Any


class CensusKey(NamedTuple):
    """What ``report()`` counts by: everything of a call that does not change step by step.

    ``kind`` is "none", and a size 0, where an operation has no such thing.
    """

    direction: str
    backend: str
    kind: str
    dtype: str
    device: str
    heads: int
    head_dim: int
    operation: str = "attention"


class Counter:
    """Counts runs of one decision's direction; made once, bumped on every call."""

    __slots__ = ("_count", "_receipt")

    def __init__(self, direction: str, backend: str, spec: Spec) -> None:
        self._receipt = Receipt(direction, backend, spec)
        device = spec.device_type if spec.capability is None else f"sm_{spec.capability}"
        kind = getattr(spec, "kind", None)
        key = CensusKey(
            direction,
            backend,
            "none" if kind is None else kind.value,
            spec.dtype,
            device,
            getattr(spec, "heads", 0),
            getattr(spec, "head_dim", 0),
            spec.operation,
        )
        # A cell of the census, so that a run costs no look-up.
        with _lock:
            self._count = _census.setdefault(key, [0])

    def bump(self) -> None:
        """Count one run; called after the backend returned."""
        with _lock:
            self._count[0] += 1
            if _recorders:
                for recorder in _recorders:
                    recorder.append(self._receipt)


_lock = threading.Lock()
_census: dict[CensusKey, list[int]] = {}
# Process-wide rather than context-local: a CUDA backward runs on the autograd engine's threads.
_recorders: list[list[Receipt]] = []


@contextmanager
def record_receipts() -> Iterator[list[Receipt]]:
    """Collect the receipts of everything that runs in the process during the block."""
    receipts: list[Receipt] = []
    with _lock:
        _recorders.append(receipts)
    try:
        yield receipts
    finally:
        with _lock:
            _recorders[:] = [item for item in _recorders if item is not receipts]


def report() -> dict[CensusKey, int]:
    """The census of the process: how often each backend ran each kind of call, most first."""
    with _lock:
        items = [(key, count[0]) for key, count in _census.items() if count[0]]
    return dict(sorted(items, key=lambda item: -item[1]))


def reset_report() -> None:
    """Start the census afresh."""
    with _lock:
        for count in _census.values():
            count[0] = 0
