"""What a backend needs that runs code of torch's front end: autograd, vmap, torch.compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

core = torch._C


@contextmanager
def plain_dispatch() -> Iterator[None]:
    """Dispatch as code outside any operator does, also where a backend runs as one.

    Operators run below autograd: the dispatcher excludes its keys and, at a graph's first run,
    those of vmap.
    """
    included = core._dispatch_tls_local_include_set()
    with core._ForceDispatchKeyGuard(included, _excluded_at_first()):
        yield


@contextmanager
def enable_autograd() -> Iterator[None]:
    """Record gradients in the block, also where a backend runs as an opaque operator.

    There ``torch.enable_grad`` alone records nothing; see ``plain_dispatch``.
    """
    with plain_dispatch(), torch.enable_grad():
        yield


@lru_cache(maxsize=1)
def _excluded_at_first() -> core.DispatchKeySet:
    """The keys that a thread starts without."""
    found: list[core.DispatchKeySet] = []
    thread = threading.Thread(
        target=lambda: found.append(core._dispatch_tls_local_exclude_set()), daemon=True
    )
    thread.start()
    thread.join()
    return found[0]
