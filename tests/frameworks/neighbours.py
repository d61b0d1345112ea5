"""Whether a document's bits depend on what is computed beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import attention
from csa_dispatch.call import Kind

BATCH, TOKENS, POOL, SLOTS, WINDOW, RATIO = 2, 11, 9, 6, 5, 2


class Results(NamedTuple):
    """Output, lse and gradients of some documents, ``[B, ..., T or S, ...]``."""

    output: Tensor
    lse: Tensor
    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor | None


class Neighbours(NamedTuple):
    """Names of the results that are bitwise the same as those of the document alone."""

    in_a_batch: set[str]
    packed: set[str]


def neighbours(backend: str, kind: Kind, heads: int) -> Neighbours:
    """Run three fp32 documents alone, as a batch, and packed into one row."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, local_kv = draw(BATCH, heads, TOKENS, 64), draw(BATCH, 1, TOKENS, 64)
    pool, sink = draw(BATCH, 1, POOL, 64), draw(heads)
    indices = torch.randint(-1, POOL, (BATCH, TOKENS, SLOTS), generator=generator)

    def run(rows: slice, packed: bool = False) -> Results:
        parts = [tensor[rows] for tensor in (query, local_kv, pool)]
        slots, offsets = indices[rows], {}
        if packed:
            parts = [torch.cat(list(part.split(1)), dim=2) for part in parts]
            slots = torch.cat(list(slots.split(1)), dim=1)
            steps = torch.arange(BATCH + 1, dtype=torch.int32)
            offsets = {"cu_seqlens": steps * TOKENS}
            if kind is not Kind.WINDOW:
                offsets["cu_seqlens_k"] = steps * POOL
        leaves = [part.clone().requires_grad_() for part in parts]
        if kind is Kind.WINDOW:
            del leaves[2]
        output, lse = attention(
            *leaves,
            kv_indices=slots if kind is Kind.GATHER else None,
            compress_ratio=RATIO if kind is Kind.DENSE else None,
            attention_sink=sink,
            sliding_window_size=WINDOW,
            return_lse=True,
            backend=backend,
            **offsets,
        )
        # The same upstream gradient in every row.
        upstream = torch.linspace(-1, 1, 64).expand(output.shape).contiguous()
        gradients = torch.autograd.grad(output, leaves, upstream)
        return Results(output.detach(), lse, gradients[0], gradients[1], (*gradients, None)[2])

    together, packed = run(slice(None)), run(slice(None), packed=True)
    same_slot, same_pack = set(Results._fields), set(Results._fields)
    for row in range(BATCH):
        alone = run(slice(row, row + 1))
        for name, one, batched, joined in zip(
            Results._fields, alone, together, packed, strict=True
        ):
            if one is None or batched is None or joined is None:
                continue
            if not torch.equal(one, batched[row : row + 1]):
                same_slot.discard(name)
            size = one.shape[2]
            if not torch.equal(one, joined[:, :, row * size : (row + 1) * size]):
                same_pack.discard(name)
    return Neighbours(same_slot, same_pack)
