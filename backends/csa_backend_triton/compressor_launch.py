"""Launchers of the compressor's call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.compressor_call import CompressorCall, CompressorNeeds, entry_table

from .compressor_kernel import pool_backward_kernel, pool_forward_kernel
from .launching import launch, programs_to_fill

ROUNDS = 8
"""Backward programs for each that ``programs_to_fill`` counts: they are small, but each keeps a
sum of the bias' gradient."""


class Tile(NamedTuple):
    slots: int
    columns: int
    warps: int


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def tile_of(call: CompressorCall, *, backward: bool) -> Tile:
    """All slots of an entry by so many channels that a thread holds 32 to 64 elements.

    Few slots get one warp: they are then summed within threads. Sums across warps go through
    shared memory; on an H200 they made tiles of 8 slots three times slower.
    """
    slots = _power_of_two(call.slots)
    if slots <= 16:
        wide = not backward and call.values.element_size() == 2
        columns, warps = (256 if wide else 128) * 8 // max(8, slots), 1
    else:
        columns = max(16, (4096 if backward else 8192) // slots)
        warps = 4 if slots <= 256 else 8
    return Tile(slots, max(16, min(columns, _power_of_two(call.head_dim))), warps)


def _tables(call: CompressorCall) -> tuple[Tensor | None, Tensor | None]:
    """First token of each packed entry's block and of the block before; -1 for none."""
    if call.cu_seqlens is None:
        return None, None
    table = entry_table(call)
    first = torch.where(table.live, table.first, -1)
    before = torch.where(table.has_previous, table.first - call.compress_ratio, -1)
    return first.to(torch.int32), before.to(torch.int32)


def _constants(call: CompressorCall, tile: Tile) -> dict[str, int | bool]:
    return {
        "D": call.head_dim,
        "RATIO": call.compress_ratio,
        "OVERLAPPING": call.overlapping,
        "PACKED": call.cu_seqlens is not None,
        "SLOTS": tile.slots,
        "COLUMNS": tile.columns,
    }


def forward(call: CompressorCall) -> Tensor:
    """Entries ``[B, T // r, D]`` in the values' dtype."""
    values, gates, tile = call.values, call.gates, tile_of(call, backward=False)
    batch, size = values.shape[0], call.head_dim
    entries = values.new_empty(batch, call.entries, size)
    launch(
        pool_forward_kernel,
        (batch * call.entries, -(-size // tile.columns)),
        (
            values,
            gates,
            call.position_bias.contiguous(),
            *_tables(call),
            entries,
            *values.stride(),
            *gates.stride(),
            call.entries,
        ),
        warps=tile.warps,
        **_constants(call, tile),
    )
    return entries


def backward(
    call: CompressorCall, grad_entries: Tensor, needs: CompressorNeeds
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of values, gates and position_bias, those that ``needs`` asks for."""
    values, gates, tile = call.values, call.gates, tile_of(call, backward=True)
    size, rows = call.head_dim, values.shape[0] * call.entries
    column_blocks = -(-size // tile.columns)
    need_values, need_gates, need_bias = needs
    grad_values = _gradient(call) if need_values else None
    grad_gates = _gradient(call) if need_gates else None
    programs = min(rows, max(1, ROUNDS * programs_to_fill(values) // column_blocks))
    each = -(-rows // max(1, programs))
    programs = -(-rows // max(1, each))
    partial = None
    if need_bias:
        partial = values.new_empty((programs, call.slots, size), dtype=torch.float32)
    token_stride = values.shape[2]
    launch(
        pool_backward_kernel,
        (programs, column_blocks),
        (
            values,
            gates,
            call.position_bias.contiguous(),
            *_tables(call),
            grad_entries,
            grad_values,
            grad_gates,
            partial,
            *values.stride(),
            *gates.stride(),
            *grad_entries.stride(),
            values.shape[1] * token_stride,
            token_stride,
            values.shape[1],
            call.entries,
            rows,
            each,
        ),
        warps=tile.warps,
        NEED_VALUES=need_values,
        NEED_GATES=need_gates,
        NEED_BIAS=need_bias,
        **_constants(call, tile),
    )
    grad_bias = None
    if partial is not None:
        by_branch = partial.sum(0).unflatten(0, (-1, call.compress_ratio))
        grad_bias = by_branch.transpose(0, 1).flatten(1).to(call.position_bias.dtype)
    return grad_values, grad_gates, grad_bias


def _gradient(call: CompressorCall) -> Tensor:
    """Memory for a gradient ``[B, T, C]``; 0 where the kernel does not see to that itself."""
    values = call.values
    if call.cu_seqlens is not None or not call.entries:
        return values.new_zeros(values.shape)
    return values.new_empty(values.shape)
