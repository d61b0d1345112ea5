"""The Hopper kernels give what the oracle does, run as Python on a CPU."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.backends.hopper import emulator

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def emulate(*arguments: object) -> str:
    """What ``emulate_kernels`` prints."""
    places = os.pathsep.join(map(str, (ROOT, ROOT / "backends")))
    run = subprocess.run(
        [sys.executable, str(HERE / "emulate_kernels.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": places, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("numbers", [range(12), range(12, 23), range(23, 38)])
def test_small_calls_agree_with_the_oracle(numbers: range) -> None:
    assert emulate(*numbers) == f"passed {len(numbers)}\n"


def test_a_nonfinite_row_reaches_what_it_sees_and_nothing_else() -> None:
    lines = emulate("taint").splitlines()
    assert len(lines) == 6
    assert all(line.endswith(" True 20") for line in lines), lines


def test_columns_apart_in_memory_change_no_bit() -> None:
    assert emulate("columns") == "True True True True True\n"


def test_items_are_spread_over_a_span_at_a_time() -> None:
    items = [tuple(map(int, line.split())) for line in emulate("spread").splitlines()]
    assert sorted(items) == [(row, head) for row in range(2500) for head in (0, 64)]
    rows = [row for row, _ in items]
    for start in (0, 1024):
        assert sorted(rows[start : start + 1024]) == list(range(start, start + 1024))
        assert rows[start : start + 128] == list(range(start, start + 1024, 8))
    last = rows[2048:2500]
    assert sorted(last) == list(range(2048, 2500))
    assert min(abs(a - b) for a, b in pairwise(last[:128])) >= 3


def squares_are_right(early: bool = False, silent: bool = False) -> bool:
    """Square four matrices that reach one warpgroup from another through one place.

    ``early``: the place is given back before the product is done. ``silent``: it never is.
    """
    hopper = emulator.stand_in()
    gl = hopper.gl
    source = torch.arange(64.0).reshape(4, 4, 4)
    found = torch.empty(4, 4, 4)
    tile = gl.allocate_shared_memory(torch.float32, [1, 4, 4], None)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    full, empty = barriers.index(0), barriers.index(1)
    hopper.mbarrier.init(full, count=128)
    hopper.mbarrier.init(empty, count=1)

    def copies() -> None:
        for i in range(4):
            hopper.mbarrier.wait(empty, (i & 1) ^ 1)
            place = emulator.pointer(source) + 16 * i + torch.arange(16).reshape(4, 4)
            hopper.copy_async(tile.index(0), place)
            hopper.arrive_when_copied(full, increment_count=False)

    def squares() -> None:
        for i in range(4):
            hopper.mbarrier.wait(full, i & 1)
            x = tile.index(0)
            product = hopper.warpgroup_mma(x, x, torch.zeros(4, 4), is_async=True)
            if early:
                hopper.mbarrier.arrive(empty)
                if i < 3:  # The next matrix overtakes the product.
                    full.wait((i & 1) ^ 1)
            found[i] = hopper.warpgroup_mma_wait(0, deps=[product])
            if not early and not silent:
                hopper.mbarrier.arrive(empty)

    gl.warp_specialize([(copies, ()), (squares, ())], [4], [24])
    return torch.equal(found, source @ source)


def test_a_place_that_comes_back_in_time_is_right() -> None:
    assert squares_are_right()


def test_a_place_given_back_too_early_shows() -> None:
    assert not squares_are_right(early=True)


def test_a_barrier_nobody_completes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "PATIENCE", 1.0)
    with pytest.raises(RuntimeError, match="deadlock"):
        squares_are_right(silent=True)
