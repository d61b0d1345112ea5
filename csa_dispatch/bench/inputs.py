"""The data of a benchmarked call, drawn on its device from the case's seed.

Contents of kv_indices:

- full: K distinct random rows of the pool in every slot.
- causal: K distinct random rows among the complete ones, ``index < (t + 1) // compress_ratio``;
  slots that find none hold -1, as a model's top-k leaves them.
- messy: full with every seventh slot and a tenth of the others -1, 3% past the pool's end and a
  tenth repeating their left neighbour.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Kind

from .suite import BenchCase

_CHUNK_ELEMENTS = 1 << 26
"""Most scores drawn at once for the indices, 256 MiB of them: T * S can be far larger."""


class BenchInputs(NamedTuple):
    """A call and the upstream gradient ``[B, H, T, D]`` of its output."""

    call: Call
    grad_output: Tensor


def build_inputs(case: BenchCase, device: torch.device) -> BenchInputs:
    """Draw a case's tensors. Every one is standard normal but the indices."""
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device).normal_(generator=generator)

    batch, tokens, head_dim = case.batch, case.tokens, case.head_dim
    query = draw(batch, case.heads, tokens, head_dim)
    local_kv = draw(batch, case.kv_heads, tokens, head_dim)
    sparse_kv = None
    if case.kind is not Kind.WINDOW:
        sparse_kv = draw(batch, case.kv_heads, case.pool, head_dim)
    sink = None
    if case.sink != "none":
        sink = draw(case.heads, of=dtype if case.sink == "same" else torch.float32)
    call = Call(
        query=query,
        local_kv=local_kv,
        sparse_kv=sparse_kv,
        kv_indices=_draw_indices(case, generator) if case.kind is Kind.GATHER else None,
        attention_sink=sink,
        cu_seqlens=None,
        cu_seqlens_k=None,
        doc_ids=None,
        sliding_window_size=case.window,
        compress_ratio=case.compress_ratio if case.kind is Kind.DENSE else None,
        scale=head_dim**-0.5,
    )
    return BenchInputs(call, draw(batch, case.heads, tokens, head_dim))


def _draw_indices(case: BenchCase, generator: torch.Generator) -> Tensor:
    """kv_indices ``[B, T, K]``, by chunks of tokens."""
    device, pool = generator.device, case.pool
    shape = (case.batch, case.tokens, case.slots)
    indices = torch.full(shape, -1, dtype=getattr(torch, case.index_dtype), device=device)
    distinct = min(case.slots, pool)
    if distinct == 0:
        return indices
    rows = indices.view(-1, case.slots)
    step = max(1, _CHUNK_ELEMENTS // pool)
    for first in range(0, rows.shape[0], step):
        chunk = rows[first : first + step]
        scores = torch.rand(chunk.shape[0], pool, generator=generator, device=device)
        if case.indices == "causal":
            token = torch.arange(first, first + chunk.shape[0], device=device) % case.tokens
            complete = (token + 1) // case.compress_ratio
            hidden = torch.arange(pool, device=device) >= complete[:, None]
            scores.masked_fill_(hidden, -1.0)
        best = scores.topk(distinct, dim=1)
        chunk[:, :distinct] = best.indices.masked_fill(best.values < 0, -1).to(chunk.dtype)
    if case.indices == "messy":
        _mess_up(rows, pool, generator)
    return indices


def _mess_up(rows: Tensor, pool: int, generator: torch.Generator) -> None:
    """Change rows ``[B * T, K]`` of valid slots as the module's text says."""
    chance = torch.rand(rows.shape, generator=generator, device=rows.device)
    repeated = torch.where(chance > 0.9, rows.roll(1, dims=1), rows)
    repeated.masked_fill_(chance < 0.13, pool + 5)
    repeated.masked_fill_(chance < 0.1, -1)
    repeated[:, ::7] = -1
    rows.copy_(repeated)
