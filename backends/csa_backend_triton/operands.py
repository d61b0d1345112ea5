"""From a Call's tensors to what kernels take: strides, copies where needed, head-dim parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Kind, TokenBounds

SCAN = 512
"""Slots a program looks at at once when it searches a token's last used slot."""


class HeadDim(NamedTuple):
    """The head dimension as two parts, each a power of two (the second may be 0)."""

    size: int
    first: int
    second: int

    @property
    def constants(self) -> dict[str, int]:
        return {"D": self.size, "D0": self.first, "D1": self.second}


def split_head_dim(size: int) -> HeadDim:
    """576 is 512 + 64, 192 is 128 + 64, 500 is 512, 80 is 128; parts are at least 64.

    Narrower parts would be right for any D but not on Hopper: Triton 3.6 reads a value tile of
    16 or 32 columns (swizzled over less than 128 bytes) wrongly there.
    """
    first = 64
    while first * 2 <= size:
        first *= 2
    rest = size - first
    if rest <= 0:
        return HeadDim(size, first, 0)
    second = 64
    while second < rest:
        second *= 2
    return HeadDim(size, first, second) if second * 2 <= first else HeadDim(size, 2 * first, 0)


def with_unit_columns(kv: Tensor) -> Tensor:
    """``kv``, or a copy when its last dimension is not contiguous.

    KV rows are read again and again, so scattered columns would cost more than the copy.
    Dimensions that are expanded stay so: only distinct rows are copied.
    """
    if kv.stride(-1) == 1 or kv.shape[-1] == 1:
        return kv
    distinct = kv
    for dim in range(kv.ndim - 1):
        if kv.stride(dim) == 0 and kv.shape[dim] > 1:
            distinct = distinct.narrow(dim, 0, 1)
    return distinct.contiguous().expand(kv.shape)


class Operands(NamedTuple):
    """A call's read-only inputs with their strides, as every kernel takes them."""

    call: Call
    local: Tensor
    pool: Tensor | None
    bounds: TokenBounds | None
    head_dim: HeadDim

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.call.query.shape[1] // self.call.local_kv.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.call.local_kv.shape[1]

    @property
    def pool_rows(self) -> int:
        return 0 if self.pool is None else self.pool.shape[2]

    @property
    def slots(self) -> int:
        return 0 if self.call.kv_indices is None else self.call.kv_indices.shape[2]

    @property
    def window(self) -> int:
        """The window, at most T: more changes nothing and could overflow an int32."""
        return min(self.call.sliding_window_size, self.call.query.shape[2])

    @property
    def is_float32(self) -> bool:
        return self.call.query.dtype == torch.float32

    @property
    def local_strides(self) -> tuple[int, ...]:
        return self.local.stride()[:3]

    @property
    def pool_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.pool is None else self.pool.stride()[:3]

    @property
    def index_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.call.kv_indices is None else self.call.kv_indices.stride()

    @property
    def tables(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Window start, pool start and pool end by token; None where there is no table."""
        return (None, None, None) if self.bounds is None else tuple(self.bounds)  # type: ignore

    @property
    def table_strides(self) -> tuple[int, ...]:
        strides = [(0, 0) if table is None else table.stride() for table in self.tables]
        return tuple(item for pair in strides for item in pair)

    def tile_is_single(self, rows: int) -> bool:
        """Whether a tile of ``rows`` rows holds one token's heads alone.

        Gathered keys belong to one token. Otherwise a tile packs several tokens when one
        token's heads would leave more than a quarter of its rows idle.
        """
        blocks = -(-self.group // rows)
        return self.call.kind is Kind.GATHER or 4 * self.group >= 3 * blocks * rows

    def wanted_rows(self) -> int:
        """Rows worth having in a tile: a token's heads, or more when tokens can be packed."""
        return self.group if self.call.kind is Kind.GATHER else max(self.group, 64)


def operands_of(call: Call, bounds: TokenBounds | None) -> Operands:
    """Gather a call's operands, copying only KV whose columns are not contiguous."""
    pool = call.sparse_kv
    return Operands(
        call,
        with_unit_columns(call.local_kv),
        None if pool is None else with_unit_columns(pool),
        bounds,
        split_head_dim(call.query.shape[3]),
    )


def tile_programs(operands: Operands, rows: int, single: bool) -> int:
    """Programs that cover all query rows of one KV head."""
    batch, _, tokens, _ = operands.call.query.shape
    if single:
        return batch * tokens * -(-operands.group // rows)
    return batch * -(-tokens * operands.group // rows)
