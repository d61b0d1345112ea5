"""What FA4 reads: one table of KV rows and, for each token, int32 slots into it.

The table is [local; sparse] of each batch entry. Slots are absolute row numbers, so documents are
a matter of which slots are used: packed calls run the same kernels as dense ones. (FA4's own
varlen form wants document-local slots, hence KV rows regrouped by document, and its dsink
reads rows past the last offset that nothing wrote.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csa_dispatch import Call, Kind, TokenBounds, token_bounds
from csa_dispatch.call_spec import stride_class

from .slots import padded, pool_slots, window_slots


class Layout(NamedTuple):
    """Where a call's rows lie in the table, and its slots in a token's row of indices.

    Attributes:
        local_rows: rows of the table that are ``local_kv``'s, first; 0 when no window reads it.
        pool_rows: rows that are ``sparse_kv``'s, after them.
        window: slots of the window, first.
        pool: slots of the pool, after them.
        width: slots with padding, a multiple of 128.
    """

    local_rows: int
    pool_rows: int
    window: int
    pool: int
    width: int


class Operands(NamedTuple):
    """The table ``[B, N, 1, D]``, the slots int32 ``[B, T, width]`` and how they are laid out.

    Slot ``i`` of a token is used iff it is not -1; padding is -1.
    """

    table: Tensor
    indices: Tensor
    layout: Layout


def layout_of(call: Call) -> Layout:
    """The layout of a call's operands, from its sizes alone."""
    tokens = call.query.shape[2]
    rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    slots = 0 if call.kv_indices is None else call.kv_indices.shape[2]
    window = window_slots(call.sliding_window_size, tokens)
    packed = call.cu_seqlens is not None
    pool = pool_slots(call.kind, slots, rows, tokens, call.compress_ratio or 1, packed)
    return Layout(tokens if window else 0, rows, window, pool, padded(window + pool))


def build_operands(call: Call) -> Operands:
    """Table and slots of a call: a Triton kernel on CUDA, PyTorch elsewhere."""
    layout, bounds = layout_of(call), token_bounds(call)
    if call.query.is_cuda and not isinstance(call.query, FakeTensor):
        from .operands_kernel import write_operands

        return write_operands(call, layout, bounds)
    return torch_operands(call, layout, bounds)


def torch_operands(call: Call, layout: Layout, bounds: TokenBounds | None) -> Operands:
    """The PyTorch twin of ``operands_kernel.write_operands``."""
    table = shared_table(call, layout)
    if table is None:
        assert call.sparse_kv is not None
        parts = [call.local_kv.detach(), call.sparse_kv.detach()]
        table = torch.cat(parts, dim=2).transpose(1, 2).contiguous()
    columns = [_window_columns(call, layout, bounds)]
    if layout.pool:
        columns.append(_pool_columns(call, layout, bounds))
    indices = torch.cat(columns, dim=2)
    unused = layout.width - layout.window - layout.pool
    return Operands(table, torch.nn.functional.pad(indices, (0, unused), value=-1), layout)


def shared_table(call: Call, layout: Layout) -> Tensor | None:
    """The table when one tensor holds all of it, without a copy where FA4 can read it; or None."""
    if not layout.pool_rows:
        return kernel_input(call.local_kv.detach().transpose(1, 2))
    if not layout.local_rows:
        assert call.sparse_kv is not None
        return kernel_input(call.sparse_kv.detach().transpose(1, 2))
    return None


def kernel_input(tensor: Tensor) -> Tensor:
    """``tensor`` itself where FA4's kernels can address it, else a contiguous copy.

    They need unit stride in the last dimension and rows on 16 bytes. FA4 passes stride 0 on to
    kernels that it compiled for other strides, so expanded tensors are copied too.
    """
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    expanded = any(step == 0 and size > 1 for step, size in steps)
    if expanded or stride_class(tensor) != "aligned":
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def dense(tensor: Tensor) -> Tensor:
    """A contiguous ``tensor``: a copy where the last stride is not 1, its size being 1 or not."""
    if tensor.is_contiguous() and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _window_columns(call: Call, layout: Layout, bounds: TokenBounds | None) -> Tensor:
    """int32 ``[B, T, window]``: the last ``window`` rows up to the token's own."""
    batch, _, tokens, _ = call.query.shape
    device = call.query.device
    token = torch.arange(tokens, device=device, dtype=torch.int32)[:, None]
    back = torch.arange(layout.window - 1, -1, -1, device=device, dtype=torch.int32)
    row = (token - back).expand(batch, tokens, layout.window)
    first = 0 if bounds is None else bounds.window_start[..., None]
    return torch.where((row >= first) & (row >= 0), row, -1)


def _pool_columns(call: Call, layout: Layout, bounds: TokenBounds | None) -> Tensor:
    """int32 ``[B, T, pool]``: the selected rows, or the first visible ones of a dense pool."""
    batch, _, tokens, _ = call.query.shape
    start: Tensor | int = 0
    length: Tensor | int = layout.pool_rows
    if bounds is not None:
        assert bounds.pool_start is not None
        assert bounds.pool_end is not None
        start = bounds.pool_start[..., None]
        length = (bounds.pool_end - bounds.pool_start)[..., None]
    if call.kind is Kind.GATHER:
        assert call.kv_indices is not None
        slot = call.kv_indices
    else:
        slot = torch.arange(layout.pool, device=call.query.device, dtype=torch.int32)
        slot = slot.expand(batch, tokens, layout.pool)
    # Compared in the caller's width: an int64 slot need not fit 32 bits.
    used = (slot >= 0) & (slot < length)
    row = torch.where(used, slot, 0).to(torch.int32) + start + layout.local_rows
    return torch.where(used, row, -1)
