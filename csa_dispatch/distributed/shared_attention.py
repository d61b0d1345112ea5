"""Attention over a shared sequence as one differentiable step, its messages under its work.

Messages are started as early as what they carry is there, and awaited where it is needed:

    forward     pool and halo leave first; a window layer's own call waits for neither
    backward    the seam first, so that the halo's gradient travels under the own call; the
                pool's gradient is summed over the ranks last
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from csa_dispatch.autograd import Once
from csa_dispatch.call import Call
from csa_dispatch.operators import CALL_SIZE

from .exchange import Shards, exact
from .local_calls import (
    Found,
    Way,
    after_zeros,
    check_backward,
    own_call,
    run_backward,
    run_forward,
    runner_of,
    seam_call,
)

_TENSORS = 8
"""Fields of a Call that are tensors; they come first."""


class SharedAttention(torch.autograd.Function):
    """Output and lse of a rank's tokens; lse is not differentiable.

    Takes the fields of a Call, the rank's shards of tensors and offsets of the whole sequence,
    then the Shards and the Way to run it.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        call, (shards, way) = Call(*arguments[:CALL_SIZE]), arguments[CALL_SIZE:]
        halo = halo_of(call, shards)
        pool, halo_kv, halo_ids = call.sparse_kv, None, None
        gathered = pool is not None and pool.numel() > 0 and shards.count > 1
        if gathered:
            assert pool is not None
            pool = shards.gather(pool.movedim(2, 0))
        if halo:
            halo_kv = shards.send(call.local_kv[:, :, -halo:].movedim(2, 0), 1)
            if call.doc_ids is not None:
                halo_ids = shards.send(call.doc_ids[:, -halo:].movedim(1, 0), 1)
        if gathered:
            pool = wait_tensor(pool).movedim(0, 2)
        call = call._replace(sparse_kv=pool)

        own = own_call(call, shards.rank)
        runners = [runner_of(own, way)]
        output, lse = run_forward(runners[0], own)
        if halo_kv is not None:
            halo_kv = wait_tensor(halo_kv).movedim(0, 2)
        if halo_ids is not None:
            halo_ids = wait_tensor(halo_ids).movedim(0, 1)
        if halo_kv is not None and shards.rank:
            seam = seam_call(call, shards.rank, halo_kv, halo_ids)
            runners.append(runner_of(seam, way))
            first, first_lse = run_forward(runners[1], seam)
            output = _with_first(output, first[:, :, halo:], way)
            lse = _with_first(lse, first_lse[:, :, halo:], way)
        elif halo_kv is not None and not way.plain:
            for nothing in (halo_kv, halo_ids):
                output = output if nothing is None else _needing(output, nothing)

        ctx.save_for_backward(*call[:_TENSORS], halo_kv, halo_ids, output, lse)
        ctx.mark_non_differentiable(lse)
        ctx.scalars, ctx.runners = call[_TENSORS:], runners
        ctx.shards, ctx.way, ctx.gathered = shards, way, gathered
        return output, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *tensors, halo_kv, halo_ids, output, lse = ctx.saved_tensors
        call = Call(*tensors, *ctx.scalars)
        # Kernels read memory, not lazy signs.
        saved = (output, lse, gradients[0].resolve_neg())
        with torch.no_grad():
            query, local, pool, sink = _gradients(ctx, call, saved, halo_kv, halo_ids)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
            name, sources = "context_parallel_attention", (*inputs, gradients[0])
            found = Once.apply(name, len(sources), *sources, query, local, pool, sink)
            query, local, pool, sink = found  # pyright: ignore[reportGeneralTypeIssues]
        return (query, local, pool, None, sink, *(None,) * 8)


def halo_of(call: Call, shards: Shards) -> int:
    """Rows that ranks send to their right neighbours."""
    return max(call.sliding_window_size - 1, 0) if shards.count > 1 else 0


def _gradients(
    ctx: Any,
    call: Call,
    saved: tuple[Tensor, Tensor, Tensor],
    halo_kv: Tensor | None,
    halo_ids: Tensor | None,
) -> Found:
    shards, needs = ctx.shards, ctx.way.needs
    halo = halo_of(call, shards)
    own = own_call(call, shards.rank)
    check_backward(ctx.runners[0], own)
    seam: Found = (None, None, None, None)
    if halo_kv is not None and shards.rank:
        placed = seam_call(call, shards.rank, halo_kv, halo_ids)
        check_backward(ctx.runners[1], placed)
        output, lse, grad_output = (after_zeros(rows[:, :, :halo], halo) for rows in saved)
        seam = run_backward(ctx.runners[1], placed, (output, lse, grad_output), needs, halo)
    query_seam, local_seam, pool_seam, sink_seam = seam
    came = None
    if halo and needs[1]:
        # The first rank has no halo to give back, and sends to nobody: nothing of what the
        # backward has, lest a graph's forward receive already.
        back = saved[2][:, : call.local_kv.shape[1]] if local_seam is None else local_seam
        came = shards.send(back[:, :, :halo].movedim(2, 0), -1)

    dropped = halo if shards.rank else 0
    query, local, pool, sink = run_backward(ctx.runners[0], own, saved, needs, dropped)
    if pool is not None:
        pool = _plus(pool, pool_seam)
        if ctx.gathered:
            pool = shards.scatter_sum(pool.movedim(2, 0))
    if query is not None and query_seam is not None:
        query[:, :, :halo] = query_seam[:, :, halo:]
    if local is not None:
        if local_seam is not None:
            _add_rows(local, 0, local_seam[:, :, halo:])
        if came is not None:
            came = wait_tensor(came).movedim(0, 2)
            _add_rows(local, local.shape[2] - came.shape[2], came)
    if sink is not None:
        sink = _plus(sink, sink_seam).to(sink.dtype)
    if pool is not None:
        if ctx.gathered:
            pool = wait_tensor(pool).movedim(0, 2)
        assert call.sparse_kv is not None
        pool = pool.to(call.sparse_kv.dtype)
    return query, local, pool, sink


def _with_first(rows: Tensor, first: Tensor, way: Way) -> Tensor:
    """``rows`` with ``first`` in place of as many, written into plain results of our own call.

    An operator's results are not written to: a selective checkpoint may have kept them.
    """
    count = first.shape[2]
    if not way.plain:
        return torch.cat((first, rows[:, :, count:]), dim=2)
    rows[:, :, :count] = first
    return rows


def _needing(rows: Tensor, nothing: Tensor) -> Tensor:
    """``rows`` after the no rows that the first rank receives.

    Of a traced forward's messages, those that no result needs would be left to the backward, and
    the neighbour wait until then for what the first rank sends.
    """
    none = nothing.to(rows.dtype).reshape(*rows.shape[:2], 0, rows.shape[3])
    return torch.cat((none, rows), dim=2)


def _plus(one: Tensor, other: Tensor | None) -> Tensor:
    """The sum in the dtype that sums over ranks are kept in."""
    return exact(one) if other is None else exact(one) + other


def _add_rows(total: Tensor, first: int, rows: Tensor) -> None:
    """Add ``rows`` to those of ``total`` from ``first`` on, in place, rounding once."""
    part = total.narrow(2, first, rows.shape[2])
    part.copy_(exact(part) + rows)
