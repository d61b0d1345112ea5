"""BlockMasks: every visible pair and no other, built by blocks, kept by shape."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from csa_backend_flex import masks
from csa_backend_flex.masks import BLOCK, KEPT, block_mask_for, build_block_mask, padded
from csa_backend_flex.spans import spans_of
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from csa_dispatch import Call, Kind
from csa_dispatch.testing import Case, build, to_call, visible_rows
from tests.backends.flex.meaning import visible, visible_to_the_backward

LENGTHS = [1, 127, 128, 129, 300]


def call_of(**fields: object) -> Call:
    base = Case(Kind.WINDOW, heads=1, head_dim=16, content="random", needs_grad=(False,) * 4)
    return to_call(build(dataclasses.replace(base, **fields)))  # pyright: ignore


def defined(call: Call) -> torch.Tensor:
    """bool ``[B, T, padded(T) + S]`` by the oracle's list of visible rows."""
    batch, _, tokens, _ = call.query.shape
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    found = torch.zeros(batch, tokens, padded(tokens) + pool, dtype=torch.bool)
    for b, rows in enumerate(visible_rows(call)):
        for t, row in enumerate(rows):
            found[b, t, row.local] = True
            found[b, t, [padded(tokens) + j for j in row.pool]] = True
    return found


def is_right(call: Call) -> None:
    mask = block_mask_for(call, spans_of(call))
    wanted = defined(call)
    assert torch.equal(visible(mask).expand_as(wanted), wanted)
    assert torch.equal(visible_to_the_backward(mask).expand_as(wanted), wanted)


@pytest.mark.parametrize("window", [0, 1, 128, 129, 256, 10**12])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_window_masks_hold_the_visible_pairs_and_no_more(tokens: int, window: int):
    is_right(call_of(tokens=tokens, window=window))


@pytest.mark.parametrize("pool", [1, 128, 200])
@pytest.mark.parametrize("ratio", [1, 2, 128])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_compressed_masks_hold_the_visible_pairs_and_no_more(tokens: int, ratio: int, pool: int):
    is_right(call_of(kind=Kind.DENSE, tokens=tokens, window=20, compress_ratio=ratio, pool=pool))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.DENSE])
@pytest.mark.parametrize("documents", ["cu_seqlens", "doc_ids"])
def test_packed_masks_hold_the_visible_pairs_and_no_more(documents: str, kind: Kind, seed: int):
    is_right(
        call_of(
            kind=kind,
            tokens=420,
            window=150,
            compress_ratio=2,
            pool=210,
            batch=2,
            documents=documents,
            content="messy",
            seed=seed,
        )
    )


def test_blocks_are_those_of_create_block_mask():
    call = call_of(kind=Kind.DENSE, tokens=700, window=300, compress_ratio=2, pool=350)
    mask = block_mask_for(call, spans_of(call))
    asked = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    assert torch.equal(mask.to_dense(), asked.to_dense())
    for ours, theirs in ((2, 2), (4, 4)):  # blocks in part, whole blocks
        assert torch.equal(mask.as_tuple()[ours], asked.as_tuple()[theirs])
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.sum() > 0


def test_a_mask_is_kept_by_shape_and_serves_any_batch():
    call = call_of(tokens=200, window=9)
    kept = block_mask_for(call, spans_of(call))
    again = call_of(tokens=200, window=9, batch=3, seed=5)
    assert block_mask_for(again, spans_of(again)) is kept
    for other in (
        call_of(tokens=201, window=9),
        call_of(tokens=200, window=10),
        call_of(kind=Kind.DENSE, tokens=200, window=9, pool=50, compress_ratio=4),
        call_of(kind=Kind.DENSE, tokens=200, window=9, pool=50, compress_ratio=7),
        call_of(kind=Kind.DENSE, tokens=200, window=9, pool=51, compress_ratio=4),
    ):
        mask = block_mask_for(other, spans_of(other))
        assert mask is not kept
        assert torch.equal(visible(mask), defined(other))
    assert block_mask_for(call, spans_of(call)) is kept


def test_kept_masks_equal_fresh_ones_and_are_few():
    for tokens in range(1, 3 * KEPT):
        call = call_of(tokens=tokens, window=5)
        block_mask_for(call, spans_of(call))
    assert len(masks._masks) == KEPT
    call = call_of(tokens=3 * KEPT - 1, window=5)
    kept, fresh = block_mask_for(call, spans_of(call)), build_block_mask(spans_of(call), 0)
    assert kept is not fresh
    for one, other in zip(kept.as_tuple()[:-1], fresh.as_tuple()[:-1], strict=True):
        assert one is other or one == other or torch.equal(one, other)


def test_documents_are_not_taken_for_other_documents():
    first, second = (
        call_of(tokens=300, window=40, documents="cu_seqlens", seed=seed) for seed in (1, 2)
    )
    for call in (first, second, first):
        is_right(call)
    assert not masks._masks


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made in the block."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.found = max(self.found, item.numel() * item.element_size())
        return result


@pytest.mark.parametrize("ratio", [0, 128])
def test_a_mask_of_32768_tokens_needs_no_table_of_pairs(ratio: int):
    tokens = 32768
    pool = torch.empty(1, 1, tokens // ratio, 16) if ratio else None
    query = torch.empty(1, 1, tokens, 16)
    call = Call(query, query, pool, None, None, None, None, None, 128, ratio or None, 1.0)
    with Largest() as largest:
        build_block_mask(spans_of(call), 0 if pool is None else pool.shape[2])
    blocks = (tokens // BLOCK) * (tokens // BLOCK + 2)
    assert largest.found <= 8 * blocks  # 0.5 MB; a table of pairs has a gigabyte
