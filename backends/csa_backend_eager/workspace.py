"""Memory for a call's temporaries, taken once and reused for every tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers that grow to the largest size asked for.

    Fresh memory costs a page fault every 4 KiB on first touch, on a CPU as much as the
    arithmetic on it. A name's tensor is valid until the same name is asked for again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor in the buffer ``name``, always of one dtype."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)  # before its successor is allocated
            self._buffers[name] = torch.empty(size, dtype=dtype, device=self._device)
        return self._buffers[name][:size].view(shape)

    def copy(self, name: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous copy of ``source`` in ``dtype``."""
        return self.empty(name, source.shape, dtype).copy_(source)
