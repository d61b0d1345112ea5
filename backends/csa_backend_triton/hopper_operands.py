"""What the Hopper kernels' launchers share: tensors as kernels take them, the plan, the cast."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from csa_dispatch.call import Call, Kind, TokenBounds

from .launching import launch

HEAD_DIM = 512
NARROW_HEAD_DIM = 128
HEAD_BLOCK = 64
PLAN_TOKENS = 8
PLAN_SLOTS = 256
CAST_ROWS = 8
LOG2_E = 1.4426950408889634


@lru_cache
def _device_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Of the tensor's device; an H100's where there is none."""
    return _device_multiprocessors(tensor.device.index) if tensor.is_cuda else 132


def programs(query: Tensor, items: int, together: int = 1) -> int:
    """Persistent programs, ``together`` of them a multiprocessor: all that its memory holds."""
    return min(together * multiprocessors(query), items)


def aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy when its rows are not contiguous and 16-byte aligned."""
    batch, head, row, column = tensor.stride()
    if column == 1 and not (batch | head | row) % 8 and not tensor.data_ptr() % 16:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def head_rows(tensor: Tensor) -> tuple[Tensor | int, ...]:
    """A ``[B, H, T, D]`` tensor and its strides in units of 8 elements, as kernels take it."""
    batch, head, row, _ = tensor.stride()
    return tensor, batch // 8, head // 8, row // 8


def slot_indices(call: Call) -> tuple[Tensor, tuple[int, int], int]:
    """kv_indices with contiguous slots, their strides over batch and token, and K.

    A call without slots gets a stand-in of one column, never read.
    """
    indices = call.kv_indices
    if indices is None or indices.shape[2] == 0:
        batch, _, tokens, _ = call.query.shape
        stand_in = torch.empty((), device=call.query.device, dtype=torch.int32)
        return stand_in.expand(batch, tokens, 1), (0, 0), 0
    if indices.stride(2) != 1:
        indices = indices.contiguous()
    return indices, (indices.stride(0), indices.stride(1)), indices.shape[2]


def plan_of(
    call: Call,
    bounds: TokenBounds | None,
    indices: Tensor,
    index_strides: tuple[int, int],
    slots: int,
) -> Tensor:
    """The table of ``hopper_plan``, int32 ``[4, B * T]``."""
    from .hopper_plan import BLOCK_KEYS, plan_kernel

    batch, _, tokens, _ = call.query.shape
    count = batch * tokens
    table = torch.empty((4, count), device=call.query.device, dtype=torch.int32)
    start, pool_start, pool_end = (None, None, None) if bounds is None else bounds
    strides = [
        (0, 0) if bound is None else bound.stride() for bound in (start, pool_start, pool_end)
    ]
    launch(
        plan_kernel,
        (-(-count // PLAN_TOKENS),),
        (
            indices,
            start,
            pool_start,
            pool_end,
            table,
            *index_strides,
            *(step for pair in strides for step in pair),
            count,
            tokens,
            slots,
            0 if call.sparse_kv is None else call.sparse_kv.shape[2],
            min(call.sliding_window_size, tokens),
        ),
        warps=4,
        HAS_BOUNDS=bounds is not None,
        DENSE=call.kind is Kind.DENSE,
        TOKENS=PLAN_TOKENS,
        SLOTS=PLAN_SLOTS,
        KEYS=BLOCK_KEYS,
    )
    return table


def cast_rows(rows: Tensor, like: Tensor) -> Tensor:
    """A KV gradient ``[B, 1, N, D]`` from its fp32 rows ``[B * N, D]`` in the kernel's order."""
    from .hopper_cast import cast_kernel

    gradient = torch.empty_like(like)
    if gradient.numel() == 0:
        return gradient
    written = (
        gradient
        if gradient.stride(-1) == 1
        else torch.empty(like.shape, device=like.device, dtype=like.dtype)
    )
    launch(
        cast_kernel,
        (-(-rows.shape[0] // CAST_ROWS),),
        (rows, written, written.stride(0), written.stride(2), like.shape[2], rows.shape[0]),
        warps=4,
        D=like.shape[3],
        ROWS=CAST_ROWS,
    )
    return gradient if written is gradient else gradient.copy_(written)
