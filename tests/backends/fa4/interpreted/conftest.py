"""On a machine without a GPU the kernel is interpreted; that is decided before triton loads."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")


@pytest.fixture
def device() -> str:
    """Where the kernel runs: the GPU, or interpreted on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
