"""Masks that keep what a row may not see out of shared products, NaN and Inf included."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fill_where(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    """Fill rows of ``tensor`` ``[..., D]`` where ``mask`` ``[...]`` holds, in place.

    These masks are nearly always empty, which a CPU can look at for free; any other device
    would have to wait for its queue, so there the fill runs unseen.
    """
    if mask.device.type == "cpu" and not mask.any():
        return tensor
    return tensor.masked_fill_(mask.unsqueeze(-1), value)


def take_out_nonfinite(keys: Tensor) -> tuple[Tensor, float]:
    """Zero the rows of ``keys`` ``[..., D]`` that hold NaN or Inf.

    A matmul multiplies masked keys by probability 0, and 0 * NaN is NaN. So keys that are
    shared by tokens of which some may not see them must be finite; ``shared_bias`` gives NaN
    to those who do see a row taken out here.

    Returns:
        Which rows were finite ``[...]``, and ``largest`` of what is left.
    """
    size = torch.maximum(keys.amax(dim=-1), -keys.amin(dim=-1))
    finite = size.isfinite()
    fill_where(keys, ~finite, 0)
    return finite, largest(size.masked_fill_(~finite, 0))


def largest(tensor: Tensor) -> float:
    """The largest magnitude in ``tensor``; NaN if it holds NaN, or if finding out would wait.

    Any device but a CPU would have to finish its queue first.
    """
    if tensor.device.type != "cpu":
        return math.nan
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def shared_bias(
    seen: Tensor, finite: Tensor, log_count: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Bias of keys shared within a block.

    Args:
        seen: bool ``[batches or 1, 1, blocks, tokens, N]``.
        finite: bool ``[batches, G, blocks, N]`` from ``take_out_nonfinite``.
        log_count: log multiplicity where seen, of the shape of ``seen``; None for once.
        dtype: the accumulation dtype.
    """
    bias = torch.zeros((), dtype=dtype, device=finite.device)
    bias = torch.where(finite, bias, torch.nan).unsqueeze(-2)
    if log_count is not None:
        bias = bias + log_count
    return torch.where(seen, bias, -torch.inf)
