"""Extra memory is what a call allocates at its peak beyond what it returns."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.bench.memory import extra_memory

CPU = torch.device("cpu")
KIB = 1024


def test_temporaries_count_at_their_peak_and_results_do_not() -> None:
    def run() -> tuple[Tensor, None]:
        first = torch.empty(100 * KIB, dtype=torch.int8)
        second = torch.empty(300 * KIB, dtype=torch.int8)
        del first, second
        third = torch.empty(200 * KIB, dtype=torch.int8)
        del third
        return torch.empty(50 * KIB, dtype=torch.int8), None

    # 400 KiB at the peak, of which 50 could have been the result's.
    assert abs(extra_memory(run, CPU) - 350 * KIB) < KIB


def test_a_result_is_counted_once_however_often_it_is_returned() -> None:
    def run() -> tuple[Tensor, ...]:
        scratch = torch.empty(64 * KIB, dtype=torch.int8)
        whole = torch.zeros(64 * KIB, dtype=torch.int8)
        del scratch
        return whole, whole[:10], whole[10:]

    assert abs(extra_memory(run, CPU) - 64 * KIB) < KIB


def test_a_call_without_temporaries_has_no_extra_memory() -> None:
    assert extra_memory(lambda: (torch.empty(64 * KIB, dtype=torch.int8),), CPU) < KIB
