"""``compress_kv``: every ``r`` tokens of KV pooled into one entry."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.auxiliary import explained_by, plain, runner_of, traced_choice
from csa_dispatch.compressor_call import (
    CompressorCall,
    CompressorNeeds,
    CompressorSpec,
    compressor_spec_of,
    pool_offsets,
)
from csa_dispatch.transforms import refuse_transforms

from .compressor_checks import check_compressor
from .compressor_operators import CompressFunction, compress_kv_op


class CompressedKV(NamedTuple):
    """What ``compress_kv`` returns.

    Attributes:
        entries: ``[B, T // r, D]``, before norm and rotary embedding.
        cu_seqlens_k: int32 ``[N + 1]`` offsets of the documents' entries, or None.
    """

    entries: Tensor
    cu_seqlens_k: Tensor | None


def _describe(
    values: Tensor,
    gates: Tensor,
    position_bias: Tensor,
    compress_ratio: int,
    *,
    overlapping: bool | None = None,
    cu_seqlens: Tensor | None = None,
) -> CompressorSpec:
    call = _checked_call(values, gates, position_bias, compress_ratio, overlapping, cu_seqlens)
    tensors = values, gates, position_bias, cu_seqlens
    return compressor_spec_of(call, _needs_of(call), tracing=not plain(*tensors))


@explained_by(_describe)
def compress_kv(
    values: Tensor,
    gates: Tensor,
    position_bias: Tensor,
    compress_ratio: int,
    *,
    overlapping: bool | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    backward_backend: str | None = None,
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
        backend: run this backend or raise; None lets context, environment and policy choose.
        backward_backend: the same for the backward alone.

    Returns:
        Entries ``[B, T // r, D]`` and their offsets ``cu_seqlens_k`` (None without
        cu_seqlens), computed on device without a sync: what ``attention()`` takes.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
        BackendRefused: the forced backend cannot run the call, or nothing can; with Reasons.
    """
    call = _checked_call(values, gates, position_bias, compress_ratio, overlapping, cu_seqlens)
    needs = _needs_of(call)
    if not plain(values, gates, position_bias, cu_seqlens):
        refuse_transforms("compress_kv")
        choice = traced_choice("compress_kv", backend, backward_backend)
        return CompressedKV(compress_kv_op(*call, list(needs), *choice), call.cu_seqlens_k)
    runner = runner_of(compressor_spec_of(call, needs), backend, backward_backend)
    if any(needs):
        entries = CompressFunction.apply(values, gates, position_bias, call, runner)
    else:
        entries = runner.forward(call)
    return CompressedKV(entries, call.cu_seqlens_k)  # pyright: ignore[reportArgumentType]


def _checked_call(
    values: Tensor,
    gates: Tensor,
    position_bias: Tensor,
    compress_ratio: int,
    overlapping: bool | None,
    cu_seqlens: Tensor | None,
) -> CompressorCall:
    overlapping = check_compressor(
        values, gates, position_bias, compress_ratio, overlapping, cu_seqlens
    )
    offsets = None if cu_seqlens is None else pool_offsets(cu_seqlens, compress_ratio)
    return CompressorCall(
        values, gates, position_bias, compress_ratio, overlapping, cu_seqlens, offsets
    )


def _needs_of(call: CompressorCall) -> CompressorNeeds:
    if not torch.is_grad_enabled():
        return (False, False, False)
    return call.values.requires_grad, call.gates.requires_grad, call.position_bias.requires_grad
