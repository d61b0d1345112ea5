"""DTensor sharding rules of the operators: data parallel and tensor parallel, both directions.

Registered when attention() first meets a DTensor. On one mesh dimension a call may be

- replicated;
- split by batch: every batched tensor is ``Shard(0)`` and the sink is replicated, its gradient
  a partial sum. Packed calls have one batch row and cannot be;
- split by query heads (tensor parallel): query, output and lse are ``Shard(1)``, the sink is
  ``Shard(0)``, indices and documents are replicated. Shared KV is replicated and its gradient a
  partial sum; KV with several heads is split with the query's heads, where each rank then has
  exactly the KV heads that its query heads read.

A rank may get no head or no batch entry (4 over 3 ranks are 2, 2, 0): see ``operators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

Placements = list[Placement | None]
_CALL_TENSORS = 8
_CALL_SCALARS = 3


class _Plan:
    """Placements of a call's tensors under one way of splitting it."""

    def __init__(
        self, query: Placement, kv: Placement, tokens: Placement, sink: Placement
    ) -> None:
        self.query, self.kv, self.tokens, self.sink = query, kv, tokens, sink

    def call(self, arguments: tuple[Any, ...]) -> Placements:
        """Placements of the call's arguments, None for what is absent or no tensor."""
        replicated = Replicate()
        wanted = (
            self.query,
            self.kv,
            self.kv,
            self.tokens,
            self.sink,
            replicated,
            replicated,
            self.tokens,
        )
        given = arguments[:_CALL_TENSORS]
        placed = zip(wanted, given, strict=True)
        return [
            *(None if value is None else placement for placement, value in placed),
            *[None] * (len(arguments) - _CALL_TENSORS),
        ]


def _pieces(size: int, ranks: Sequence[int]) -> list[int]:
    """What each rank gets of ``size``, split as torch.chunk does, dimension by dimension."""
    pieces = [size]
    for count in ranks:
        pieces = [
            max(0, min(step, whole - rank * step))
            for whole in pieces
            for step in [-(-whole // count)]
            for rank in range(count)
        ]
    return pieces


def heads_line_up(heads: int, groups: int, mesh: Sequence[int]) -> bool:
    """Whether every rank's query heads read exactly the KV heads that it gets.

    DTensor combines the rules over the mesh's dimensions by itself, so this must hold for each
    set of dimensions that it may split the heads over: all that have at most ``groups`` ranks.
    """
    return all(
        _pieces(heads, ranks) == [heads // groups * piece for piece in _pieces(groups, ranks)]
        for count in range(1, len(mesh) + 1)
        for ranks in combinations(mesh, count)
        if prod(ranks) <= groups
    )


def _plans(arguments: tuple[Any, ...]) -> list[tuple[_Plan, Placement, Placement]]:
    """Each way to split the call, with the placements of KV's and the sink's gradients."""
    whole, batch, heads = Replicate(), Shard(0), Shard(1)
    found: list[tuple[_Plan, Placement, Placement]] = [
        (_Plan(whole, whole, whole, whole), whole, whole)
    ]
    query, local_kv, cu_seqlens = arguments[0], arguments[1], arguments[5]
    groups = local_kv.shape[1]
    if cu_seqlens is None:
        found.append((_Plan(batch, batch, batch, whole), batch, Partial()))
    if groups == 1:
        found.append((_Plan(heads, whole, whole, Shard(0)), Partial(), Shard(0)))
    elif heads_line_up(query.shape[1], groups, query.mesh.shape):
        found.append((_Plan(heads, heads, whole, Shard(0)), heads, Shard(0)))
    return found


@cache
def register_sharding_rules() -> None:
    """Register the rules with DTensor; once a process."""

    @register_sharding(torch.ops.csa_dispatch.attention.default)
    def _(*arguments: Any) -> list[tuple[Placements, Placements]]:
        return [
            ([plan.query, plan.query], plan.call(arguments)) for plan, _, _ in _plans(arguments)
        ]

    @register_sharding(torch.ops.csa_dispatch.attention_backward.default)
    def _(*arguments: Any) -> list[tuple[Placements, Placements]]:
        call = arguments[3:]
        needs = call[_CALL_TENSORS + _CALL_SCALARS]
        found: list[tuple[Placements, Placements]] = []
        for plan, kv_gradient, sink_gradient in _plans(call):
            wanted = (plan.query, kv_gradient, kv_gradient, sink_gradient)
            # What is not needed comes back as an empty tensor, the same everywhere.
            results: Placements = [
                placement if needed else Replicate()
                for placement, needed in zip(wanted, needs, strict=True)
            ]
            found.append((results, [plan.query] * 3 + plan.call(call)))
        return found
