"""``compress_kv``: every ``r`` tokens of KV pooled into one entry."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compressor_checks import check_compressor
from .entry_table import pool_offsets
from .pooling import Pooling, pool_backward, pool_forward


class CompressedKV(NamedTuple):
    """What ``compress_kv`` returns.

    Attributes:
        entries: ``[B, T // r, D]``, before norm and rotary embedding.
        cu_seqlens_k: int32 ``[N + 1]`` offsets of the documents' entries, or None.
    """

    entries: Tensor
    cu_seqlens_k: Tensor | None


def compress_kv(
    values: Tensor,
    gates: Tensor,
    position_bias: Tensor,
    compress_ratio: int,
    *,
    overlapping: bool | None = None,
    cu_seqlens: Tensor | None = None,
) -> CompressedKV:
    """Pool every ``compress_ratio`` tokens into one entry by learned, gated weights.

    Plain (``C = D``), a channel at a time over the r tokens of block i::

        entry_i = sum_j softmax_j(gates_j + position_bias[j % r]) * values_j

    Overlapping (``C = 2 D``: branch a, then branch b) one softmax runs over 2r slots: branch a
    of block i - 1 and branch b of block i; a document's first block has its own r alone. This is
    DeepSeek-V4's compressor without its linear maps, norm and rotary embedding, which entry i
    gets at position ``i * r`` (within its document).

    Softmax, weighted sum and its reduction are in fp32 (fp64 for fp64) and rounded once, in the
    gradients too. Differentiable once in values, gates and position_bias, each alone or
    together; only the inputs are kept for the backward.

    Args:
        values: ``[B, T, C]`` float64, float32, bfloat16 or float16.
        gates: ``[B, T, C]``, the values' dtype.
        position_bias: ``[r, C]`` in the values' dtype or float32; its gradient has its dtype.
        compress_ratio: r, 1 or more tokens an entry. Tokens of a trailing partial block form no
            entry: they and whatever they hold reach nothing, and their gradient is 0.
        overlapping: which form; None means overlapping for ratio 4, as V4 has it.
        cu_seqlens: int32 ``[N + 1]`` offsets of packed documents along T (B is 1). Document n
            gets ``length // r`` entries of its own tokens. The shape stays ``[1, T // r, D]``:
            rows past the last document's entries are 0, as is the gradient of all tokens that
            no entry pools.

    Returns:
        Entries ``[B, T // r, D]`` and their offsets ``cu_seqlens_k`` (None without
        cu_seqlens), computed on device without a sync: what ``attention()`` takes.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
    """
    overlapping = check_compressor(
        values, gates, position_bias, compress_ratio, overlapping, cu_seqlens
    )
    cu_seqlens_k = None if cu_seqlens is None else pool_offsets(cu_seqlens, compress_ratio)
    entries = torch.ops.csa_dispatch.compress_kv(
        values, gates, position_bias, compress_ratio, overlapping, cu_seqlens, cu_seqlens_k
    )
    return CompressedKV(entries, cu_seqlens_k)


_POOLING = (
    "Tensor values, Tensor gates, Tensor position_bias, int compress_ratio, bool overlapping, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k"
)


@torch.library.custom_op(
    "csa_dispatch::compress_kv", mutates_args=(), schema=f"({_POOLING}) -> Tensor"
)
def _compress_kv(*arguments: Any) -> Tensor:
    return pool_forward(Pooling(*arguments))


@_compress_kv.register_fake
def _(*arguments: Any) -> Tensor:
    pooling = Pooling(*arguments)
    return pooling.values.new_empty(pooling.values.shape[0], pooling.entries, pooling.head_dim)


@torch.library.custom_op(
    "csa_dispatch::compress_kv_backward",
    mutates_args=(),
    schema=f"(Tensor grad_entries, bool[] needs, {_POOLING}) -> (Tensor, Tensor, Tensor)",
)
def _compress_kv_backward(
    grad_entries: Tensor, needs: tuple[bool, bool, bool], *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of values, gates and position_bias; an empty tensor for each not needed."""
    found = pool_backward(Pooling(*arguments), grad_entries, needs)
    return tuple(
        grad_entries.new_empty(0) if item is None else item.contiguous() for item in found
    )


@_compress_kv_backward.register_fake
def _(grad_entries: Tensor, needs: tuple[bool, bool, bool], *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if needed
        else grad_entries.new_empty(0)
        for tensor, needed in zip(arguments[:3], needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:3], *inputs[5:])
    ctx.scalars = inputs[3:5]


def _backward(ctx: Any, grad_entries: Tensor) -> tuple[Tensor | None, ...]:
    values, gates, position_bias, *offsets = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    found = torch.ops.csa_dispatch.compress_kv_backward(
        grad_entries, needs, values, gates, position_bias, *ctx.scalars, *offsets
    )
    gradients = (item if needed else None for item, needed in zip(found, needs, strict=True))
    return (*gradients, None, None, None, None)


_compress_kv.register_autograd(_backward, setup_context=_setup_context)
