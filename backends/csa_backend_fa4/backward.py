"""The backward: FA4's sparse-MLA kernels, fed with any forward's output and lse."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csa_dispatch import Call, Gradients

from .entry_points import entry_points
from .forward import device_of
from .operands import Operands, build_operands, dense, kernel_input

Needs = tuple[bool, bool, bool, bool]

MEMORY_SHARE = 64
"""Default scratch for dS: this part of the device's memory, 2.8 GiB of a B200's 180."""

DEFAULT_SCRATCH = 2 * 2**30
"""Scratch in bytes where there is no device to ask."""

SMALLEST_CHUNK = 1024
"""Tokens a chunk has at least: several waves of a GPU with 148 multiprocessors."""

TOKEN_BLOCK = 128
"""Chunks are whole blocks of this many tokens."""


class Options(NamedTuple):
    """What trades memory for time in the backward.

    Attributes:
        recompute_p: recompute the probabilities in the backward kernel. False runs FA4's forward
            again and keeps them, ``B * T * H * slots`` values of the query's dtype.
        scratch_bytes: how large FA4's dS scratch may grow before the tokens are worked off in
            chunks; None for a 64th of the device's memory.
    """

    recompute_p: bool = True
    scratch_bytes: int | None = None


def backward(
    call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, needs: Needs, options: Options
) -> Gradients:
    """The gradients asked for; see ``csa_dispatch.Backend.backward``."""
    operands = build_operands(call)
    if not call.query.numel() or not operands.table.numel():
        return _zeros(call, needs)
    sink = None
    if needs[3] and call.attention_sink is not None:
        sink = call.attention_sink.detach().float()
        # exp(sink - lse) is inf - inf where the sink takes all; -inf gives the 0 it should be.
        sink = dense(torch.where(sink == math.inf, -math.inf, sink))
    tensors = _Tensors(
        operands.table,
        kernel_input(call.query.detach().transpose(1, 2)),
        kernel_input(output.transpose(1, 2)),
        _upstream(call, operands, grad_output),
        dense(lse.transpose(1, 2)),
        operands.indices,
    )
    with device_of(call.query):
        grad_table, grad_query, grad_sink = _run(call, tensors, sink, options)
    return _gradients(call, operands, grad_table, grad_query, grad_sink, needs)


class _Tensors(NamedTuple):
    """FA4's operands, all with the batch dimension first.

    Attributes:
        table: ``[B, N, 1, D]``.
        query, output, grad_output: ``[B, T, H, D]``.
        lse: fp32 ``[B, T, H]``.
        indices: int32 ``[B, T, width]``.
    """

    table: Tensor
    query: Tensor
    output: Tensor
    grad_output: Tensor
    lse: Tensor
    indices: Tensor

    def entry(self, batch: int) -> _Tensors:
        """One batch entry, the batch dimension kept."""
        return _Tensors(*(tensor[batch : batch + 1] for tensor in self))


def _upstream(call: Call, operands: Operands, grad_output: Tensor) -> Tensor:
    """``grad_output`` as ``[B, T, H, D]``, zero in rows without keys.

    Those rows may hold NaN, which would reach dsink through ``sum(output * grad_output)``. Where
    every token has a window there are none, and nothing is copied.
    """
    upstream = grad_output.transpose(1, 2)
    if not rows_without_keys(call.sliding_window_size, call.cu_seqlens is not None):
        return kernel_input(upstream)
    seen = (operands.indices >= 0).any(-1)[..., None, None]
    kept = torch.empty(upstream.shape, dtype=upstream.dtype, device=upstream.device)
    return torch.where(seen, upstream, upstream.new_zeros(()), out=kept)


def rows_without_keys(window: int, packed: bool) -> bool:
    """Whether a call may have them: it has no window, or rows past its last offset."""
    return window == 0 or packed


def _run(
    call: Call, tensors: _Tensors, sink: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of table (fp32), query and sink (fp32).

    FA4 chunks one batch entry only, so a batch whose dS does not fit goes entry by entry.
    """
    batch, tokens, heads, _ = tensors.query.shape
    row_bytes = heads * tensors.indices.shape[2] * tensors.query.element_size()
    scratch = options.scratch_bytes or device_scratch(tensors.query)
    if batch * tokens * row_bytes <= scratch:
        return _one(call, tensors, sink, options, None)
    chunk = token_chunk(tokens, row_bytes, scratch)
    if batch == 1:
        return _one(call, tensors, sink, options, chunk)
    pieces = [_one(call, tensors.entry(b), sink, options, chunk) for b in range(batch)]
    grad_tables, grad_queries, grad_sinks = zip(*pieces, strict=True)
    total = None if sink is None else torch.stack(grad_sinks).sum(0)
    return torch.cat(grad_tables), torch.cat(grad_queries), total


def _one(
    call: Call, tensors: _Tensors, sink: Tensor | None, options: Options, chunk: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    functions = entry_points()
    p = row_max = None
    if not options.recompute_p:
        # It stores them for inputs that require gradients only.
        forward_sink = call.attention_sink
        _, _, p, row_max, _ = functions.forward(
            q=None,
            k=None,
            v=tensors.table,
            qv=tensors.query.detach().requires_grad_(),
            softmax_scale=call.scale,
            learnable_sink=None if forward_sink is None else dense(forward_sink.detach()),
            pack_gqa=True,
            gather_kv_indices=tensors.indices,
            gather_bwd_recompute_p=False,
        )
    _, _, grad_table, grad_query, grad_sink = functions.backward(
        q=None,
        k=None,
        v=tensors.table,
        qv=tensors.query,
        out=tensors.output,
        dout=tensors.grad_output,
        lse=tensors.lse,
        p=p,
        row_max=row_max,
        gather_kv_indices=tensors.indices,
        learnable_sink=sink,
        softmax_scale=call.scale,
        recompute_p=options.recompute_p,
        token_chunk=chunk,
    )
    return grad_table, grad_query, grad_sink


def device_scratch(tensor: Tensor) -> int:
    """Bytes dS may take by default on ``tensor``'s device; asks no stream, so never waits."""
    if not tensor.is_cuda or isinstance(tensor, FakeTensor):
        return DEFAULT_SCRATCH
    return torch.cuda.get_device_properties(tensor.device).total_memory // MEMORY_SHARE


def token_chunk(tokens: int, row_bytes: int, scratch: int) -> int | None:
    """Tokens a chunk, in whole blocks and evenly cut, so that dS fits; None for all at once.

    Args:
        tokens: T of one batch entry.
        row_bytes: dS bytes of one token.
        scratch: bytes dS may take.
    """
    most = max(SMALLEST_CHUNK, scratch // row_bytes)
    if tokens <= most:
        return None
    chunks = -(-tokens // (most // TOKEN_BLOCK * TOKEN_BLOCK))
    return -(-tokens // (chunks * TOKEN_BLOCK)) * TOKEN_BLOCK


def _gradients(
    call: Call,
    operands: Operands,
    grad_table: Tensor,
    grad_query: Tensor,
    grad_sink: Tensor | None,
    needs: Needs,
) -> Gradients:
    """The contract's gradients from FA4's: the table's is split and rounded once."""
    layout, dtype = operands.layout, call.query.dtype
    rows = grad_table.transpose(1, 2)
    local = pool = sink = None
    if needs[1]:
        local = torch.zeros_like(call.local_kv)
        if layout.local_rows:
            local = rows[:, :, : layout.local_rows].to(dtype)
    if needs[2] and call.sparse_kv is not None:
        pool = rows[:, :, layout.local_rows :].to(dtype)
        if not layout.pool_rows:
            pool = torch.zeros_like(call.sparse_kv)
    if grad_sink is not None and call.attention_sink is not None:
        sink = grad_sink.to(call.attention_sink.dtype)
    return Gradients(grad_query.transpose(1, 2) if needs[0] else None, local, pool, sink)


def _zeros(call: Call, needs: Needs) -> Gradients:
    inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
    return Gradients(
        *(
            torch.zeros_like(tensor) if need and tensor is not None else None
            for tensor, need in zip(inputs, needs, strict=True)
        )
    )
