"""The KV rows FlexAttention reads, with what must not spread left out.

FlexAttention multiplies masked values by zero, so NaN in a row would reach every token of its
tile. Here rows that nobody sees, or that are not finite, are zeros; ``poison`` then says what the
latter make NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Call

from .masks import padded
from .spans import Span, Spans


class Poison(NamedTuple):
    """What rows that are not finite make NaN: ``[B, G, T]`` bool, and ``[B, G, T or S]``."""

    tokens: Tensor
    local: Tensor
    pool: Tensor | None


class Rows(NamedTuple):
    """``table`` is ``[B, G, padded(T) + S, D]``, the pool's rows from ``padded(T)`` on."""

    table: Tensor
    poison: Poison


def build_rows(call: Call, spans: Spans) -> Rows:
    """The rows of a window or dense-compressed call, on its device, without waiting for it."""
    batch, groups, tokens, head_dim = call.local_kv.shape
    everyone = torch.ones(batch, 1, tokens, dtype=torch.bool, device=call.query.device)
    local, odd_local = _clean(call.local_kv, spans.local, everyone)
    tokens_odd = spans.local.tokens_that_see(odd_local)
    parts = [local, local.new_zeros(batch, groups, padded(tokens) - tokens, head_dim)]
    if spans.pool is not None and call.sparse_kv is not None:
        pool, odd_pool = _clean(call.sparse_kv, spans.pool, everyone)
        tokens_odd = tokens_odd | spans.pool.tokens_that_see(odd_pool)
        parts.append(pool)
    pool_poison = None
    if spans.pool is not None and call.sparse_kv is not None:
        pool_poison = spans.pool.rows_seen(tokens_odd, call.sparse_kv.shape[2])
    poison = Poison(tokens_odd, spans.local.rows_seen(tokens_odd, tokens), pool_poison)
    return Rows(torch.cat(parts, dim=2), poison)


def _clean(kv: Tensor, span: Span, everyone: Tensor) -> tuple[Tensor, Tensor]:
    """``kv`` with zeros for rows that may not be read, and which seen rows are not finite."""
    kv = kv.detach()
    finite = kv.isfinite().all(-1)
    seen = span.rows_seen(everyone, kv.shape[2])
    return torch.where((finite & seen)[..., None], kv, 0), seen & ~finite
