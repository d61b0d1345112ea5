"""Receipts: what really ran, forward and backward, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .call_spec import CallSpec


class Receipt(NamedTuple):
    """One run of one direction of one backend."""

    direction: str
    backend: str
    spec: CallSpec


class CensusKey(NamedTuple):
    """What ``report()`` counts by: everything of a call that does not change step by step."""

    direction: str
    backend: str
    kind: str
    dtype: str
    device: str
    heads: int
    head_dim: int


class Counter:
    """Counts runs of one decision's direction; made once, bumped on every call."""

    __slots__ = ("_key", "_receipt")

    def __init__(self, direction: str, backend: str, spec: CallSpec) -> None:
        self._receipt = Receipt(direction, backend, spec)
        device = spec.device_type if spec.capability is None else f"sm_{spec.capability}"
        self._key = CensusKey(
            direction, backend, spec.kind.value, spec.dtype, device, spec.heads, spec.head_dim
        )

    def bump(self) -> None:
        """Count one run; called after the backend returned."""
        with _lock:
            _census[self._key] = _census.get(self._key, 0) + 1
            if _recorders:
                for recorder in _recorders:
                    recorder.append(self._receipt)


_lock = threading.Lock()
_census: dict[CensusKey, int] = {}
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
        items = list(_census.items())
    return dict(sorted(items, key=lambda item: -item[1]))


def reset_report() -> None:
    """Start the census afresh."""
    with _lock:
        _census.clear()
