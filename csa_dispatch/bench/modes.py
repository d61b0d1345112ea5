"""Torch's process-wide modes during a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic as fill_mode


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms inside the block, without torch's filling of fresh memory.

    The filling is a debugging aid of torch's; it would be timed along with the backend.
    """
    with _modes(wanted, warn_only=False, fill=False):
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill everything that torch allocates uninitialised inside the block with NaN.

    That needs deterministic algorithms; unless they are insisted on already they only warn, which
    changes no backend's choice of kernels.
    """
    insists = torch.are_deterministic_algorithms_enabled()
    with _modes(True, warn_only=not insists, fill=True):
        yield


@contextmanager
def _modes(enabled: bool, *, warn_only: bool, fill: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = fill_mode.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    fill_mode.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        fill_mode.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
        torch.use_deterministic_algorithms(before, warn_only=warned)
