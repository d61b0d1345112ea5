"""Autograd inside a backend: for a backward that differentiates its own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def enable_autograd() -> Iterator[None]:
    """Record gradients in the block, also where a backend runs as an opaque operator.

    Operators run below autograd: there ``torch.enable_grad`` alone records nothing, since the
    dispatcher excludes the autograd keys. The block takes them out of the exclusion.
    """
    core = torch._C
    included = core._dispatch_tls_local_include_set()
    excluded = core._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(core.DispatchKey, name))
    with core._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
