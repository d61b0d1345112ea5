"""KV rows that are not finite, kept from the fused kernels and put back into the results.

The kernels multiply masked values of a tile by zero, so NaN in a row would reach tokens that do
not see it, and in the backward other rows. They get zeros for such rows; what the rows make NaN
is worked out here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """What tokens see.

    Attributes:
        low: first window row, ``[B or 1, T]``; the last is the token's own. Past it: no window.
        slots: pool rows ``[B, T, K]``, counted through the whole pool, -1 where unused.
    """

    low: Tensor
    slots: Tensor

    def any(self) -> Tensor:
        """``[B, T]`` bool: the token sees any row."""
        token = torch.arange(self.low.shape[1], device=self.low.device)
        return (self.low <= token) | (self.slots >= 0).any(-1)

    def tokens_that_see(self, local: Tensor, pool: Tensor) -> Tensor:
        """Tokens ``[B, G, T]`` that see any of the flagged rows ``[B, G, T]``, ``[B, G, S]``."""
        before = torch.nn.functional.pad(local.cumsum(-1, dtype=torch.int32), (1, 0))
        tokens = before[..., 1:] > before.gather(-1, self._first(local))
        if self.slots.numel():
            # One more row, which unused slots read, and which is never flagged.
            flags = torch.nn.functional.pad(pool, (0, 1))
            chosen = flags.gather(-1, self._rows(pool)).unflatten(-1, self.slots.shape[1:])
            tokens = tokens | chosen.any(-1)
        return tokens

    def rows_seen(self, tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Rows ``[B, G, T]`` and ``[B, G, rows]`` that any flagged token ``[B, G, T]`` sees."""
        step = tokens.to(torch.int32)
        change = torch.nn.functional.pad(-step, (1, 0)).scatter_add_(-1, self._first(tokens), step)
        pool = step.new_zeros(*tokens.shape[:2], rows + 1)
        if self.slots.numel():
            share = step[..., None].expand(*step.shape, self.slots.shape[2]).flatten(2)
            pool.scatter_add_(-1, self._rows(pool[..., :rows]), share)
        return change.cumsum(-1)[..., :-1] > 0, pool[..., :rows] > 0

    def _first(self, like: Tensor) -> Tensor:
        """Window starts ``[B, G, T]``; where there is no window, the row after the token's own."""
        token = torch.arange(self.low.shape[1], device=self.low.device)
        return torch.minimum(self.low, token + 1)[:, None].long().expand(like.shape)

    def _rows(self, pool: Tensor) -> Tensor:
        """Slots as ``[B, G, T * K]``; unused ones name the row after the pool's ``[B, G, S]``."""
        batch, groups, rows = pool.shape
        slots = torch.where(self.slots >= 0, self.slots, rows).long().flatten(1)
        return slots[:, None].expand(batch, groups, -1)


class OddRows(NamedTuple):
    """Clean copies, and what the odd rows make NaN.

    Attributes:
        local_kv, sparse_kv: with zeros in rows that are not finite, or that nobody sees.
        tokens: bool ``[B, G, T]``: the token sees an odd row.
        local, pool: bool ``[B, G, T]`` and ``[B, G, S]``: such a token sees the row.
    """

    local_kv: Tensor
    sparse_kv: Tensor
    tokens: Tensor
    local: Tensor
    pool: Tensor


def without_odd_rows(local_kv: Tensor, sparse_kv: Tensor, seen: Seen) -> OddRows:
    """Find the odd rows; no waiting for the device."""
    rows = sparse_kv.shape[2]
    everyone = torch.ones_like(local_kv[:, :1, :, 0], dtype=torch.bool)
    wanted = seen.rows_seen(everyone, rows)
    local_finite, pool_finite = (kv.isfinite().all(-1) for kv in (local_kv, sparse_kv))
    tokens = seen.tokens_that_see(wanted[0] & ~local_finite, wanted[1] & ~pool_finite)
    return OddRows(
        torch.where((wanted[0] & local_finite)[..., None], local_kv, 0),
        torch.where((wanted[1] & pool_finite)[..., None], sparse_kv, 0),
        tokens,
        *seen.rows_seen(tokens, rows),
    )


def by_head(tokens: Tensor, heads: int) -> Tensor:
    """``[B, G, T]`` as ``[B, H, T]``."""
    return tokens.repeat_interleave(heads // tokens.shape[1], dim=1)


def spoil(tensor: Tensor, where: Tensor) -> Tensor:
    """``tensor`` with NaN in rows ``where``."""
    return tensor.masked_fill(where[..., None], math.nan)
