"""The lightning indexer on the GPU: scores into a bounded workspace, then picks, by blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import (
    Between,
    IndexerCall,
    IndexerCapabilities,
    IndexerSpec,
    OneOf,
    Operation,
    Reason,
    visible_entries,
)

from .interpreter import is_interpreted

WORKSPACE_BYTES = 256 * 2**20
"""Most that a block's scores take, whatever T and S; one token's scores may take more."""

LONGEST_RESIDENT = 16384
"""Most scores of a token that one program holds in registers."""


class ScoreTile(NamedTuple):
    """Tokens by entries of one program of ``score_kernel``."""

    rows: int
    entries: int
    warps: int
    stages: int


def _compute_capability(spec: IndexerSpec) -> Reason | None:
    """On CUDA the device is of compute capability 8.0 or newer."""
    if spec.device_type != "cuda" or spec.capability is None or spec.capability >= 80:
        return None
    return Reason("capability", str(spec.capability), "at least 80", "Use the eager backend.")


CAPABILITIES = IndexerCapabilities(
    dtype=OneOf(("bfloat16", "float16", "float32"), others=("float64",)),
    device_type=OneOf(
        ("cuda", "cpu") if is_interpreted() else ("cuda",),
        others=("meta",) if is_interpreted() else ("cpu", "meta"),
    ),
    head_dim=Between(1, 128),
    predicates=(_compute_capability,),
    remedies=(
        ("dtype", "use eager"),
        ("device_type", "set TRITON_INTERPRET=1 before start"),
        ("head_dim", "use eager"),
    ),
)


class TritonIndexer(Operation):
    """Scores by tensor cores with the heads added up in registers; picks in ascending order."""

    forward_capabilities = CAPABILITIES

    def forward(self, call: IndexerCall) -> Tensor:
        return pick_entries(call)


def score_tile(capability: int, tokens: int, float32: bool) -> ScoreTile:
    """What fits an architecture's shared memory and registers, for so many tokens."""
    rows = min(128, max(16, 1 << (tokens - 1).bit_length()))
    if float32:
        return ScoreTile(min(rows, 32), 64, 4, 1)
    if capability in (90, 100, 103):
        return ScoreTile(rows, 128, 8 if rows == 128 else 4, 3)
    return ScoreTile(min(rows, 64), 64, 4, 2)


def pick_entries(call: IndexerCall, tile: ScoreTile | None = None) -> Tensor:
    """Picks, int32 ``[B, T, topk]``; ``tile`` overrides the table, for tuning."""
    from .launching import capability_of

    query, keys = call.index_query, call.index_keys
    batch, _, tokens, head_dim = query.shape
    pool = keys.shape[1]
    start, end = visible_entries(call)
    picks = torch.empty((batch, tokens, call.topk), dtype=torch.int32, device=query.device)
    columns = max(64, 1 << (head_dim - 1).bit_length())
    if tile is None:
        float32 = query.dtype == torch.float32
        tile = score_tile(capability_of(query), tokens, float32)
    width = -(-max(pool, 1) // tile.entries) * tile.entries
    step = max(1, WORKSPACE_BYTES // (4 * batch * width))
    step = min(tokens, max(step // tile.rows, 1) * tile.rows)
    scores = torch.empty(batch * step * width, dtype=torch.float32, device=query.device)
    for first in range(0, tokens, step):
        rows = min(step, tokens - first)
        longest = pool
        if call.cu_seqlens is None:
            longest = min(pool, (call.past + first + rows) // call.compress_ratio)
        if longest > call.topk:
            _score(call, start, end, scores, width, first, rows, longest, columns, tile)
        _select(call, start, end, scores, width, first, rows, longest, picks)
    return picks


def _score(
    call: IndexerCall,
    start: Tensor,
    end: Tensor,
    scores: Tensor,
    width: int,
    first: int,
    rows: int,
    longest: int,
    columns: int,
    tile: ScoreTile,
) -> None:
    from .indexer_kernel import score_kernel
    from .launching import launch

    query, keys, weights = call.index_query, call.index_keys, call.weights
    launch(
        score_kernel,
        (-(-rows // tile.rows), -(-longest // tile.entries), query.shape[0]),
        (
            query,
            keys,
            weights,
            start,
            end,
            scores,
            *query.stride(),
            *keys.stride(),
            *weights.stride(),
            *start.stride(),
            *end.stride(),
            width,
            first,
            rows,
            keys.shape[1],
            call.topk,
            query.shape[1],
        ),
        warps=tile.warps,
        D=query.shape[3],
        COLUMNS=columns,
        ROWS=tile.rows,
        ENTRIES=tile.entries,
        STAGES=tile.stages,
    )


def _select(
    call: IndexerCall,
    start: Tensor,
    end: Tensor,
    scores: Tensor,
    width: int,
    first: int,
    rows: int,
    longest: int,
    picks: Tensor,
) -> None:
    from .indexer_kernel import select_kernel
    from .launching import launch

    block = min(LONGEST_RESIDENT, max(256, 1 << max(longest - 1, 0).bit_length()))
    launch(
        select_kernel,
        (rows, call.index_query.shape[0]),
        (
            scores,
            start,
            end,
            picks,
            *start.stride(),
            *end.stride(),
            picks.stride(0),
            width,
            first,
            call.topk,
        ),
        warps=max(1, min(16, block // 512)),
        BLOCK=block,
        RESIDENT=longest <= block,
    )
