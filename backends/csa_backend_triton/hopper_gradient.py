"""The Hopper backward: its launches, and what becomes of what they write.

KV gradients are added atomically to an fp32 buffer or, for a deterministic backward, stored row
by row and added in order (``hopper_ordered``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, TokenBounds

from .hopper_operands import (
    HEAD_BLOCK,
    LOG2_E,
    NARROW_HEAD_DIM,
    aligned,
    cast_rows,
    head_rows,
    plan_of,
    programs,
    slot_indices,
)
from .launching import launch
from .operands import operands_of
from .sink_gradient import sink_gradient
from .upstream import Upstream

REGISTERS = {"MATRIX_REGISTERS": 192, "GATHER_REGISTERS": 32}
"""Of a thread by role; the scatter warpgroup gets 96. With 184, wgmma are serialised: twice the
time."""


class _Work(NamedTuple):
    """One backward's tensors, as its launches take them."""

    call: Call
    query: Tensor
    local: Tensor
    pool: Tensor
    grad_output: Tensor
    output: Tensor
    lse: Tensor
    delta: Tensor
    grad_query: Tensor | None
    plan: Tensor
    indices: tuple[Tensor, tuple[int, int], int]
    needs: tuple[bool, bool, bool, bool]

    def start(
        self,
        target: Tensor,
        items: int,
        first_row: int | None = None,
        places: int | None = None,
        window_blocks: int | None = None,
    ) -> None:
        """Start the kernel; with a first row it stores, see ``hopper_backward_scatter``."""
        call = self.call
        batch, heads, tokens, head_dim = call.query.shape
        indices, index_strides, slots = self.indices
        if head_dim == NARROW_HEAD_DIM:
            from .hopper_narrow_backward import backward_kernel

            together, ordered, constants = 2, (), {}
        else:
            from .hopper_backward import backward_kernel

            together, ordered = 1, (first_row, places, window_blocks)
            # In parts Q and dO come back earlier; gathered calls are 2% faster without.
            parts = 4 if call.kind is Kind.DENSE or first_row is not None else 1
            constants = {"PARTS": parts, **REGISTERS}
        launch(
            backward_kernel,
            (programs(self.query, items, together),),
            (
                *head_rows(self.query),
                *head_rows(self.grad_output),
                *head_rows(self.local),
                *head_rows(self.pool),
                *head_rows(self.output),
                *head_rows(self.query if self.grad_query is None else self.grad_query),
                self.plan,
                indices,
                *index_strides,
                heads,
                tokens,
                slots,
                batch * tokens,
                items,
                self.lse,
                self.delta,
                target,
                0 if call.sparse_kv is None else call.sparse_kv.shape[2],
                *ordered,
                call.scale,
                call.scale * LOG2_E,
            ),
            warps=4,
            QUERY_GRADIENT=int(self.needs[0]),
            LOCAL_GRADIENT=int(self.needs[1]),
            POOL_GRADIENT=int(self.needs[2]),
            DENSE=call.kind is Kind.DENSE,
            **constants,
        )


def backward(
    call: Call,
    bounds: TokenBounds | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> Gradients:
    """Gradients asked for by ``needs`` (query, local_kv, sparse_kv, attention_sink)."""
    query, local = aligned(call.query), aligned(call.local_kv)
    indices = slot_indices(call)
    grad_query = written = torch.empty_like(call.query) if needs[0] else None
    if grad_query is not None and grad_query.stride(-1) != 1:
        written = torch.empty_like(query)
    work = _Work(
        call,
        query,
        local,
        local if call.sparse_kv is None else aligned(call.sparse_kv),
        aligned(grad_output),
        aligned(output),
        lse,
        # Tokens without keys keep the 0, whatever grad_output holds.
        torch.zeros_like(lse),
        written,
        plan_of(call, bounds, *indices),
        indices,
        needs,
    )
    if deterministic:
        grad_local, grad_pool = _in_order(work, bounds)
    else:
        grad_local, grad_pool = _atomically(work)
    if grad_query is not None and written is not None and written is not grad_query:
        grad_query.copy_(written)
    grad_sink = None
    if needs[3] and call.attention_sink is not None:
        upstream = Upstream(operands_of(call, bounds), output, lse, grad_output, work.delta)
        grad_sink = sink_gradient(upstream, call.attention_sink)
    return Gradients(grad_query, grad_local, grad_pool, grad_sink)


def _atomically(work: _Work) -> tuple[Tensor | None, Tensor | None]:
    call = work.call
    batch, heads, tokens, head_dim = call.query.shape
    rows = batch * tokens
    pool_rows = 0 if call.sparse_kv is None else batch * call.sparse_kv.shape[2]
    shape = (rows + pool_rows, head_dim)
    sums = torch.zeros(shape, device=call.query.device, dtype=torch.float32)
    work.start(sums, rows * -(-heads // HEAD_BLOCK))
    grad_local = cast_rows(sums[:rows], call.local_kv) if work.needs[1] else None
    if not work.needs[2] or call.sparse_kv is None:
        return grad_local, None
    return grad_local, cast_rows(sums[rows:], call.sparse_kv)


def _in_order(work: _Work, bounds: TokenBounds | None) -> tuple[Tensor | None, Tensor | None]:
    from .hopper_ordered import ordered_gradients

    head_blocks = -(-work.call.query.shape[1] // HEAD_BLOCK)

    def start(partial: Tensor, places: int, window_blocks: int, first: int, end: int) -> None:
        work.start(partial, (end - first) * head_blocks, first, places, window_blocks)

    _, local, pool, _ = work.needs
    return ordered_gradients(operands_of(work.call, bounds), work.plan, start, local, pool)
