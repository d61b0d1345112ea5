"""Slots name exactly the rows that each token sees, in every kind and way of packing."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch import CallSpec, SlotLayout, slot_layout, slot_rows, token_bounds
from csa_dispatch.call import Kind
from csa_dispatch.testing import Case, build, to_call
from csa_dispatch.testing.oracle import visible_rows

CASES = [
    Case(kind, "float32", batch, 2, documents=documents, head_dim=16, window=window, tokens=21)
    for kind in Kind
    for documents, batch in (("none", 2), ("cu_seqlens", 1), ("doc_ids", 3))
    for window in (0, 5, 140)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_slots_are_the_rows_that_a_token_sees(case: Case) -> None:
    call = to_call(build(case))
    layout = slot_layout(call)
    slots = slot_rows(call, layout, token_bounds(call))
    assert (slots.dtype, slots.shape) == (torch.int32, (case.batch, 21, layout.width))
    for entry, tokens in enumerate(visible_rows(call)):
        for token, seen in enumerate(tokens):
            used = [slot for slot in slots[entry, token].tolist() if slot != -1]
            wanted = [*seen.local, *(layout.local_rows + row for row in seen.pool)]
            assert sorted(used) == sorted(wanted), (entry, token)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_described_call_has_the_layout_of_a_real_one(case: Case) -> None:
    assert slot_layout(case.spec()) == slot_layout(to_call(build(case)))


@pytest.mark.parametrize(("slots", "width"), [(0, 128), (1, 128), (128, 128), (129, 256)])
def test_rows_of_slots_are_whole_blocks(slots: int, width: int) -> None:
    assert SlotLayout(0, 64, 0, slots).width == width


def test_a_window_call_has_no_pool_slots_whatever_its_spec_says() -> None:
    assert slot_layout(CallSpec(kind=Kind.WINDOW)) == SlotLayout(4096, 0, 128, 0)
