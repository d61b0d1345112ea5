"""examples/parallel_training.py: every way of training gives the losses of one process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch.distributed.fsdp")

STEPS = 3


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "examples" / "parallel_training.py"
    # Spawned processes find it by name.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(path.parent))
    del sys.modules[path.stem]


@pytest.fixture(scope="module")
def alone(example: ModuleType) -> list[float]:
    """Losses of one process."""
    losses = example.run("one", STEPS)
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("mode", ["dp-tp", "cp"])
def test_losses_equal_one_process(example: ModuleType, alone: list[float], mode: str) -> None:
    assert example.run(mode, STEPS) == pytest.approx(alone, rel=2e-5)
