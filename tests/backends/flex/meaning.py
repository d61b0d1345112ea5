"""What FlexAttention means, in PyTorch that differentiates anywhere; it refuses to on a CPU.

It looks at nothing but the BlockMask, as the kernels do: the forward's and the backward's lists of
blocks, and mask_mod within partial blocks alone.
"""

from __future__ import annotations

import math

import torch
from csa_backend_flex.masks import BLOCK
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def visible(mask: BlockMask) -> Tensor:
    """bool ``[B, T, rows]``: the pairs that the forward's lists of blocks hold."""
    return _pairs(mask, *mask.as_tuple()[2:6])


def visible_to_the_backward(mask: BlockMask) -> Tensor:
    """The same by the lists that go from KV blocks to token blocks."""
    return _pairs(mask, *mask.as_tuple()[6:10], transposed=True)


def _pairs(mask, counts, order, full_counts, full_order, transposed=False) -> Tensor:
    tokens, rows = mask.seq_lengths
    whole, partial = _blocks(full_counts, full_order), _blocks(counts, order)
    if transposed:
        whole, partial = whole.mT, partial.mT
    assert torch.compiler.is_compiling() or not (whole & partial).any()

    def spread(blocks: Tensor) -> Tensor:
        wide = blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
        return wide[:, 0, :tokens, :rows]

    batch = torch.arange(counts.shape[0], device=counts.device)[:, None, None]
    token = torch.arange(tokens, device=counts.device)[:, None]
    row = torch.arange(rows, device=counts.device)
    asked = mask.mask_mod(batch, batch, token, row).expand(counts.shape[0], tokens, rows)
    return spread(whole) | (spread(partial) & asked)


def _blocks(counts: Tensor, order: Tensor) -> Tensor:
    """bool: the blocks named by the first ``counts`` of ``order``."""
    first = torch.arange(order.shape[-1], device=order.device) < counts[..., None]
    return torch.zeros_like(first).scatter(-1, order.long(), first)


def attend(query: Tensor, table: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and lse, both differentiable, of the pairs in ``mask``.

    Masked values are multiplied by zero, as in the kernels: NaN in them spreads.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    groups = table.shape[1]
    grouped = query.unflatten(1, (groups, -1)).to(exact)
    pairs = visible(mask)[:, None, None]
    scores = scale * torch.einsum("bgntd,bgsd->bgnts", grouped, table.to(exact))
    scores = torch.where(pairs, scores, -math.inf)
    some = pairs.any(-1)
    lse = torch.logsumexp(torch.where(some[..., None], scores, 0), -1)
    weights = torch.where(some[..., None], torch.exp(scores - lse[..., None]), 0)
    low = weights.to(query.dtype).to(exact)
    output = torch.einsum("bgnts,bgsd->bgntd", low, table.to(exact)).flatten(1, 2)
    lse = torch.where(some, lse, -math.inf).flatten(1, 2)
    return output.to(query.dtype), lse
