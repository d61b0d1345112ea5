"""How wide a token's row of slots is: the window's rows, then the selected or dense pool rows."""

from __future__ import annotations

from csa_dispatch import CallSpec, Kind, Reason

BLOCK = 128
"""Rows of slots are padded to blocks of this many; the width is part of a kernel's key."""

DENSE_SLOTS_LIMIT = 2048
"""Widest row for kinds that need no index: beyond it the table of slots outgrows the KV."""

ELEMENTS_LIMIT = 2**31 - 1
"""Query elements that 32 bits address."""


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
    packed, ratio = spec.documents == "cu_seqlens", spec.compress_ratio or 1
    pool = pool_slots(spec.kind, spec.slots, spec.pool, spec.tokens, ratio, packed)
    return window_slots(spec.window, spec.tokens) + pool


def dense_slots_bounded(spec: CallSpec) -> Reason | None:
    """Window and dense-compressed kinds run through indices: at most 2048 rows a token."""
    if spec.kind is Kind.GATHER or spec_slots(spec) <= DENSE_SLOTS_LIMIT:
        return None
    actual = f"{spec_slots(spec)} rows a token"
    needed = f"at most {DENSE_SLOTS_LIMIT} for the {spec.kind.value} kind"
    return Reason("dense_slots_bounded", actual, needed, "use triton or eager")


def addresses_fit(spec: CallSpec) -> Reason | None:
    """Elements of the query (B, T, H, D): at most 2**31 - 1."""
    elements = spec.batch * spec.tokens * spec.heads * spec.head_dim
    if elements <= ELEMENTS_LIMIT:
        return None
    actual = f"{elements} elements of the query"
    return Reason("addresses_fit", actual, f"at most {ELEMENTS_LIMIT}", "use triton")
