"""How wide a call's slot table is: the window's rows, then the selected or dense pool rows."""

from __future__ import annotations

from csa_dispatch import CallSpec, Kind, Reason

BLOCK = 128
"""The kernels take slots in blocks of this many."""

DENSE_SLOTS_LIMIT = 2048
"""Widest table for rows that need no index: windows and dense-compressed pools.

It is the width the kernels are tuned for (DeepSeek's top-k). Beyond it most of a causal pool's
slots are unused yet walked, and the table itself (4 bytes a slot and token) outgrows the KV.
"""


def window_slots(window: int, tokens: int) -> int:
    """Slots of the window: no token sees more rows than there are."""
    return min(window, tokens)


def pool_slots(
    kind: Kind, slots: int, pool: int, tokens: int, compress_ratio: int, packed: bool
) -> int:
    """Slots of the pool; of a dense pool, the entries complete at the last token."""
    if kind is Kind.GATHER:
        return slots
    if kind is not Kind.DENSE:
        return 0
    # A packed document may have begun before row 0: its tokens see more than the rows tell.
    return pool if packed else min(pool, tokens // compress_ratio)


def padded(slots: int) -> int:
    """``slots`` rounded up to whole blocks, one at least."""
    return max(1, -(-slots // BLOCK)) * BLOCK


def spec_slots(spec: CallSpec) -> int:
    """Slots a token of ``spec``, before padding."""
    packed = spec.documents == "cu_seqlens"
    pool = pool_slots(spec.kind, spec.slots, spec.pool, spec.tokens, spec.compress_ratio, packed)
    return window_slots(spec.window, spec.tokens) + pool


def dense_slots_bounded(spec: CallSpec) -> Reason | None:
    """Window and dense-compressed kinds run through indices: at most 2048 rows a token."""
    if spec.kind is Kind.GATHER or spec_slots(spec) <= DENSE_SLOTS_LIMIT:
        return None
    actual = f"{spec_slots(spec)} rows a token"
    needed = f"at most {DENSE_SLOTS_LIMIT} for the {spec.kind.value} kind"
    return Reason("dense_slots_bounded", actual, needed, "use triton or eager")
