"""On an NVIDIA GPU: events, the allocator's peak, and a whole run."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch.bench import run_suite
from csa_dispatch.bench.memory import extra_memory
from csa_dispatch.bench.suite import Effort
from csa_dispatch.bench.timing import CudaClock, time_interleaved
from csa_dispatch.parity.results import Status
from tests.bench.test_runner import suite_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.serial
@pytest.mark.parametrize("flush_l2", [True, False])
def test_events_time_the_device_and_not_the_host(flush_l2: bool) -> None:
    device = torch.device("cuda", 0)
    runs = {
        name: lambda cycles=cycles: torch.cuda._sleep(cycles)
        for name, cycles in (("short", 1_000_000), ("long", 4_000_000))
    }
    clock = CudaClock(device, flush_l2=flush_l2)
    samples = time_interleaved(runs, clock, Effort(rounds=3, seconds=0.02))
    short, long = (min(sample.elapsed for sample in samples[name]) for name in runs)
    assert 3 < long / short < 5
    assert all(sample.host < sample.elapsed for sample in samples["long"])


def test_extra_memory_is_the_allocators_peak() -> None:
    device = torch.device("cuda", 0)

    def run() -> tuple[torch.Tensor]:
        scratch = torch.empty(32 << 20, dtype=torch.int8, device=device)
        result = torch.empty(16 << 20, dtype=torch.int8, device=device)
        del scratch
        return (result,)

    assert extra_memory(run, device) == 32 << 20


def test_a_suite_runs_on_the_gpu() -> None:
    suite = suite_of(
        {"dtype": "bfloat16", "head_dim": 64, "directions": ["forward", "backward", "both"]},
        {"name": "messy", "indices": "messy"},
    )
    run = run_suite(suite, backends=["eager", "triton"], device="cuda")
    assert not run.failures
    assert {row.backend for row in run.rows if row.status is Status.PASS} == {"eager", "triton"}


def test_a_deterministic_case_runs_on_the_gpu() -> None:
    suite = suite_of({"dtype": "bfloat16", "head_dim": 64, "deterministic": True})
    run = run_suite(suite, backends=["triton"], device="cuda")
    assert [row.status for row in run.rows] == [Status.PASS, Status.PASS]
