"""One key a kernel in Triton's cache on disk, whichever kernels a process compiles before it.

Triton 3.6 adds to a caller's key the constants that its callee is known to use, and only then
finds out which those are (3.9 does it in turn). A caller's key depends on whether its callee had
been seen before, and a process compiles again what another has warmed up. So callees come first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITCallable

PACKAGE = __name__.rpartition(".")[0]

_settled: set[str] = set()


def settle_key(kernel: Any) -> None:
    """Work out the keys of a kernel and of all that it may call; of a settled one, do nothing."""
    if isinstance(kernel, JITCallable):
        _settle(kernel.__module__)


def _settle(module: str) -> None:
    """Imported modules first, then a module's functions as they stand, callees above callers."""
    if module in _settled or not module.startswith(PACKAGE):
        return
    _settled.add(module)
    for value in list(vars(sys.modules[module]).values()):
        for function in _functions(value):
            _settle(function.__module__)
            _ = function.cache_key


def _functions(value: Any) -> Iterator[Any]:
    """The compiled functions that a module's value is or, as an aggregate, has."""
    if isinstance(value, JITCallable):
        yield value
    elif getattr(value, "__triton_aggregate__", False):
        yield from value.hash_attrs
