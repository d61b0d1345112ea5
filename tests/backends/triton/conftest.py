"""On a machine without a GPU the kernels are interpreted; that is decided before triton loads."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")


@pytest.fixture
def device() -> str:
    """Where the kernels run: the GPU, or interpreted on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
