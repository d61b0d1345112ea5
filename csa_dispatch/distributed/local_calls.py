"""The calls that a rank makes: one on its own rows, and a small one at the seam.

A window reaches back over ``W - 1`` rows, so the rank's first ``W - 1`` tokens, and they alone,
need rows of the left neighbour's. The rank's own call runs on its tensors as they are, and what
it finds for those tokens, whose windows end at its first row, is dropped. The seam's call finds
it: its rows are the neighbour's last ``W - 1`` and the rank's first, its queries zeros and the
rank's first. Nothing as long as the shard is copied where plain results may be written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from csa_dispatch.autograd import Needs
from csa_dispatch.call import Call, Kind, begun_before
from csa_dispatch.call_spec import spec_of
from csa_dispatch.forcing import Forced
from csa_dispatch.operators import attention_op, chosen_runner, run_attention_backward
from csa_dispatch.policy import current_policy
from csa_dispatch.runner import Runner, runner_for
from csa_dispatch.settings import settings

Found = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of query, local_kv, sparse_kv and sink; None for what needs none."""


class Way(NamedTuple):
    """How a rank's calls are run.

    Attributes:
        needs: which of query, local_kv, sparse_kv and sink need gradients.
        forced: the backends that the caller insists on.
        plain: whether the opaque operators may be skipped.
    """

    needs: Needs
    forced: Forced
    plain: bool


class _Operators:
    """The opaque operators, in a Runner's place."""

    backward_uses_lse = False  # what runs is chosen when they run

    def __init__(self, way: Way) -> None:
        forced = way.forced
        self.routing = list(way.needs), forced.forward or "", forced.backward or ""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return attention_op(*call, *self.routing, False)  # values have been checked

    def backward(
        self, call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, needs: Needs
    ) -> Found:
        _, *names = self.routing
        query, local, pool, sink = run_attention_backward(
            grad_output, output, lse, call, needs, *names
        )
        return query, local, pool, sink


def own_call(call: Call, rank: int) -> Call:
    """The ``rank``-th rank's call on its own rows; ``call`` has its tensors and the whole pool."""
    tokens = call.query.shape[2]
    return _placed(call, rank * tokens)


def seam_call(call: Call, rank: int, halo_kv: Tensor, halo_ids: Tensor | None) -> Call:
    """The call on the left neighbour's last rows, ``[B, G, W - 1, D]``, and as many own ones."""
    halo = halo_kv.shape[2]
    query, local_kv = call.query[:, :, :halo], call.local_kv[:, :, :halo]
    indices, ids = call.kv_indices, call.doc_ids
    if indices is not None:
        indices = F.pad(indices[:, :halo], (0, 0, halo, 0), value=-1)
    if ids is not None:
        assert halo_ids is not None
        ids = torch.cat((halo_ids, ids[:, :halo]), dim=1)
    seam = call._replace(
        query=after_zeros(query, halo),
        local_kv=torch.cat((halo_kv, local_kv), dim=2),
        kv_indices=indices,
        doc_ids=ids,
    )
    return _placed(seam, rank * call.query.shape[2] - halo)


def after_zeros(rows: Tensor, count: int) -> Tensor:
    """``[B, H, T, D]`` or ``[B, H, T]`` rows after ``count`` rows of zeros."""
    return F.pad(rows, (*(0, 0) * (rows.ndim - 3), count, 0))


def _placed(call: Call, first: int) -> Call:
    """``call`` with offsets as seen from its rows, which begin at the sequence's row ``first``.

    A document that began earlier keeps its true, negative beginning where the compress ratio
    counts from it.
    """
    rows = call.query.shape[2]
    if call.cu_seqlens is not None:
        lowest = None if call.kind is Kind.DENSE else 0
        return call._replace(cu_seqlens=(call.cu_seqlens - first).clamp(min=lowest, max=rows))
    if call.kind is not Kind.DENSE or first == 0:
        return call
    assert call.sparse_kv is not None
    offsets, pool_offsets = begun_before(first, call.query, call.sparse_kv)
    return call._replace(cu_seqlens=offsets, cu_seqlens_k=pool_offsets)


def runner_of(call: Call, way: Way) -> Runner | _Operators:
    """What runs ``call``, forward and backward.

    Raises:
        BackendRefused: see ``csa_dispatch.routing.route``.
    """
    if not way.plain:
        return _Operators(way)
    spec = spec_of(next(_entries(call)), way.needs)
    return runner_for(spec, way.forced, current_policy(settings().policy))


def run_forward(runner: Runner | _Operators, call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of ``call``."""
    found = [runner.forward(entry) for entry in _entries(call)]
    if len(found) == 1:
        return found[0]
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def check_backward(runner: Runner | _Operators, call: Call) -> None:
    """Refuse a backward before anything is sent for it; compiled code refuses when it runs.

    Raises:
        BackendRefused: deterministic algorithms were switched on since the forward.
    """
    if isinstance(runner, Runner):
        runner.check_backward()
    elif call.query.numel() and not torch.compiler.is_compiling():
        chosen_runner(next(_entries(call)), *runner.routing)


def run_backward(
    runner: Runner | _Operators,
    call: Call,
    saved: tuple[Tensor, Tensor, Tensor],
    needs: Needs,
    dropped: int,
) -> Found:
    """Gradients of ``call``, of whose results the first ``dropped`` tokens' were not used.

    Args:
        saved: output, lse and the output's gradient; what they hold for the dropped tokens is
            not read.
    """
    output, lse, grad_output = saved
    if dropped and runner.backward_uses_lse:  # where lse is +inf, every probability is 0
        lse = _filled(lse, dropped, math.inf)
    elif dropped:
        grad_output = _filled(grad_output, dropped, 0.0)
    entries = list(_entries(call))
    if len(entries) == 1:
        return runner.backward(call, output, lse, grad_output, needs)
    rows = zip(output.split(1), lse.split(1), grad_output.split(1), strict=True)
    found = [
        runner.backward(entry, *saved, needs) for entry, saved in zip(entries, rows, strict=True)
    ]
    query, local, pool, sinks = (
        None if items[0] is None else items for items in zip(*found, strict=True)
    )
    return (
        None if query is None else torch.cat(query),
        None if local is None else torch.cat(local),
        None if pool is None else torch.cat(pool),
        None if sinks is None else torch.stack(sinks).sum(0),
    )


def _filled(rows: Tensor, count: int, value: float) -> Tensor:
    """A copy of ``rows`` whose first ``count`` tokens' hold ``value``."""
    rows = rows.clone()
    rows[:, :, :count] = value
    return rows


def _entries(call: Call) -> Iterator[Call]:
    """The call, or one for each batch entry where offsets stand for positions."""
    batch = call.query.shape[0]
    if call.cu_seqlens is None or batch == 1:
        yield call
        return
    for entry in range(batch):
        one = slice(entry, entry + 1)
        yield call._replace(
            query=call.query[one],
            local_kv=call.local_kv[one],
            sparse_kv=None if call.sparse_kv is None else call.sparse_kv[one],
        )
