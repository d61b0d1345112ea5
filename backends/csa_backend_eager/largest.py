"""The largest of each row, the first among equals: ``torch.topk`` leaves open which it takes."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scores of each row and their columns, int64, both ``[n, count]``.

    Columns ascend, but those of -inf come last. Of equal scores (-0.0 equals 0.0) the first
    columns are taken, of -inf any. No score is NaN. Off the CPU nothing waits for the device.
    """
    found, columns = scores.topk(count, dim=1, sorted=False)
    last = found.amin(1, keepdim=True)
    if may_wait(scores):
        left_out = (scores == last).sum(1) > (found == last).sum(1)
        rows = (left_out & (last[:, 0] > -torch.inf)).nonzero()[:, 0]
        if len(rows):
            columns[rows] = _first_among_equals(scores[rows], last[rows], count)
            found = scores.gather(1, columns)
    else:
        columns = _first_among_equals(scores, last, count)
        found = scores.gather(1, columns)
    width = scores.shape[1]
    columns = torch.where(found > -torch.inf, columns, columns + width).sort(1).values
    columns = columns.remainder_(width)
    return scores.gather(1, columns), columns


def may_wait(scores: Tensor) -> bool:
    """Whether looking at the values costs no sync."""
    return scores.device.type == "cpu"


def _first_among_equals(scores: Tensor, last: Tensor, count: int) -> Tensor:
    """The columns above each row's ``last``, and the first of those that equal it."""
    above, equal = scores > last, scores == last
    wanted = count - above.sum(1, keepdim=True)
    equal &= equal.cumsum(1, dtype=torch.int32) <= wanted
    chosen = above.logical_or_(equal)
    # The others are all written beyond the end.
    slots = torch.where(chosen, chosen.cumsum(1) - 1, count)
    columns = slots.new_empty(len(scores), count + 1)
    every = torch.arange(scores.shape[1], device=scores.device).expand_as(slots)
    return columns.scatter_(1, slots, every)[:, :count]
