"""Counts of work agree with counting by definition."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch.bench.counts import Pairs, count_pairs, work_of
from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.testing import visible_rows
from tests.bench.test_inputs import case_of


@pytest.mark.parametrize("kind", ["window", "gather", "dense-compressed"])
@pytest.mark.parametrize("window", [0, 4, 64])
@pytest.mark.parametrize("indices", ["full", "causal", "messy"])
def test_used_pairs_are_the_visible_ones(kind: str, window: int, indices: str) -> None:
    call = build_inputs(
        case_of(kind=kind, window=window, indices=indices, batch=2), torch.device("cpu")
    ).call
    rows = [row for batch in visible_rows(call) for row in batch]
    pairs = count_pairs(call)
    assert pairs.used == sum(len(row.local) + len(row.pool) for row in rows)
    slots = 6 * (kind == "gather")
    dense = sum(len(row.pool) for row in rows) * (kind == "dense-compressed")
    assert pairs.nominal == 2 * 40 * (window + slots) + dense


def test_flops_follow_the_published_formula() -> None:
    call = build_inputs(case_of(), torch.device("cpu")).call
    nominal = 4 * 1 * 40 * 2 * 16 * (4 + 6)
    forward = work_of(call, count_pairs(call), "forward")
    assert forward.nominal_flops == nominal
    assert work_of(call, count_pairs(call), "backward").nominal_flops == 2.5 * nominal
    assert work_of(call, count_pairs(call), "both").nominal_flops == 3.5 * nominal
    assert 0 < forward.used_flops < nominal


def test_bytes_are_each_tensor_once() -> None:
    call = build_inputs(case_of(), torch.device("cpu")).call
    rows, local, pool = 2 * 40 * 16 * 2, 40 * 16 * 2, 10 * 16 * 2
    slots, lse, sink = 40 * 6 * 4, 2 * 40 * 4, 2 * 4
    forward = 2 * rows + local + pool + slots + lse + sink
    backward = 4 * rows + 2 * (local + pool + sink) + slots + lse
    nothing = Pairs(0, 0)
    assert work_of(call, nothing, "forward").bytes == forward
    assert work_of(call, nothing, "backward").bytes == backward
    assert work_of(call, nothing, "both").bytes == forward + backward
