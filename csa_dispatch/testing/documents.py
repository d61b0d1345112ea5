"""Random document layouts and slot tables, empty documents and awkward slots included."""

from __future__ import annotations

import torch
from torch import Tensor

FILLER = (-1, -1, -1, -2, -(2**31), 2147480000)
"""Values callers put in unused slots. Others, just past the pool, are added by its length."""


def draw_offsets(tokens: int, *, spare: int, generator: torch.Generator) -> Tensor:
    """int32 ``[N + 1]`` offsets of five documents over ``tokens - spare`` rows.

    One is empty; the first holds a single token where there is room.
    """
    end = tokens - spare
    inner = torch.randint(min(1, end), end + 1, (3,), generator=generator).tolist()
    cuts = sorted([min(1, end), *inner])
    cuts.insert(2, cuts[1])
    return torch.tensor([0, *cuts[:4], end], dtype=torch.int32)


def split_pool(offsets: Tensor, pool: int, ratio: int, generator: torch.Generator) -> Tensor:
    """int32 ``[N + 1]`` offsets that share ``pool`` rows out to the documents of ``offsets``.

    With a ratio each document gets its complete entries first, as far as the pool goes; what is
    left over, which nobody may see, goes to random documents. Without one the cuts are random,
    so that a document with tokens may have no pool.
    """
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    wanted = [length // ratio for length in lengths] if ratio else [0] * len(lengths)
    sizes, left = [], pool
    for want in wanted:
        sizes.append(min(want, left))
        left -= sizes[-1]
    while left:
        document = int(torch.randint(len(sizes), (), generator=generator))
        share = int(torch.randint(1, left + 1, (), generator=generator))
        sizes[document] += share
        left -= share
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def draw_doc_ids(batch: int, tokens: int, aligned: int, generator: torch.Generator) -> Tensor:
    """int64 ``[B, T]`` non-decreasing ids with gaps, changing at multiples of ``aligned``.

    They go from -1 over 0, or to 1 at once, for ids are only compared.
    """
    blocks = -(-tokens // aligned)
    change = torch.rand(batch, blocks, generator=generator) < min(0.5, 4 / max(1, blocks))
    step = change * torch.randint(1, 3, (batch, blocks), generator=generator)
    return (step.cumsum(1) - 1).repeat_interleave(aligned, dim=1)[:, :tokens].contiguous()


def draw_indices(
    shape: tuple[int, int, int],
    pool: int,
    offsets: Tensor | None,
    pool_offsets: Tensor | None,
    content: str,
    generator: torch.Generator,
) -> Tensor:
    """int64 ``[B, T, K]`` slots, valid in each token's document unless ``content`` says not.

    Slots are distinct except in ``duplicates`` and ``messy``; what a short pool cannot fill
    stays -1.
    """
    batch, tokens, slots = shape
    table = torch.full(shape, -1, dtype=torch.int64)
    lengths = [pool] * tokens
    if offsets is not None and pool_offsets is not None:
        sizes = (pool_offsets[1:] - pool_offsets[:-1]).tolist()
        document = torch.searchsorted(
            offsets[1:].contiguous(), torch.arange(tokens, dtype=torch.int32), right=True
        )
        lengths = [sizes[d] if d < len(sizes) else 0 for d in document.tolist()]
    for b in range(batch):
        for t, length in enumerate(lengths):
            # The last quarter of a pool stays unselected, for poison to be put there.
            usable = length if content == "random" else -(-3 * length // 4)
            chosen = torch.randperm(usable, generator=generator)[:slots]
            table[b, t, : len(chosen)] = chosen
            if content in ("duplicates", "messy") and len(chosen) > 1:
                again = torch.randint(len(chosen), (len(chosen),), generator=generator)
                repeat = torch.rand(len(chosen), generator=generator) < 0.4
                table[b, t, : len(chosen)] = torch.where(repeat, chosen[again], chosen)
            if content in ("scattered", "messy"):
                values = torch.tensor([*FILLER, length, length + 1, max(length, pool) + 7])
                filler = values[torch.randint(len(values), (slots,), generator=generator)]
                unused = torch.rand(slots, generator=generator) < (1.0 if t % 7 == 3 else 0.35)
                table[b, t] = torch.where(unused, filler, table[b, t])
    return table
