"""What every token sees, as spans of rows: one of ``local_kv``, one of ``sparse_kv``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call, token_bounds


class Span(NamedTuple):
    """Rows ``low <= row < high`` for every token, int32 ``[B or 1, T]`` each.

    Both ends move forward along the tokens, but for empty spans.
    """

    low: Tensor
    high: Tensor

    @property
    def empty(self) -> Tensor:
        return self.low >= self.high

    def tokens_that_see(self, rows: Tensor) -> Tensor:
        """Tokens ``[B, G, T]`` whose span holds any of the flagged rows ``[B, G, R]``."""
        before = torch.nn.functional.pad(rows.cumsum(-1, dtype=torch.int32), (1, 0))
        size = (*rows.shape[:2], self.low.shape[1])
        low, high = (end[:, None].long().expand(size) for end in self)
        return (before.gather(-1, high) > before.gather(-1, low)) & ~self.empty[:, None]

    def rows_seen(self, tokens: Tensor, rows: int) -> Tensor:
        """Rows ``[B, G, rows]`` in the span of any of the flagged tokens ``[B, G, T]``."""
        size = tokens.shape
        step = (tokens & ~self.empty[:, None]).to(torch.int32)
        change = step.new_zeros(*size[:2], rows + 1)
        low, high = (end[:, None].long().expand(size) for end in self)
        change.scatter_add_(-1, low, step).scatter_add_(-1, high, -step)
        return change.cumsum(-1)[..., :rows] > 0


class Spans(NamedTuple):
    """The spans of a call; ``pool`` is None for the window kind."""

    local: Span
    pool: Span | None


def spans_of(call: Call) -> Spans:
    """The spans of a window or dense-compressed call, on its device and without waiting for it."""
    tokens = call.query.shape[2]
    rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    token = torch.arange(tokens, device=call.query.device, dtype=torch.int32)
    window = min(call.sliding_window_size, tokens)
    low, high = (token - window + 1).clamp(min=0)[None], (token + 1)[None]
    bounds = token_bounds(call)
    if bounds is None:
        return Spans(Span(low, high), None)
    # Of an empty document's or spare row's span both ends may lie past the rows.
    local = Span(torch.maximum(low, bounds.window_start).clamp(max=tokens), high)
    if bounds.pool_start is None or bounds.pool_end is None:
        return Spans(local, None)
    return Spans(local, Span(bounds.pool_start.clamp(0, rows), bounds.pool_end.clamp(0, rows)))
