"""``attention_with_past`` on the kernels: gathered windows, and documents begun before row 0."""

from __future__ import annotations

import pytest
import torch

from tests.functional.test_past import KINDS, check_steps, tensors


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_steps_give_the_rows_of_the_whole(kind: str, device: str):
    call = [
        item.to(device) if isinstance(item, torch.Tensor) else item
        for item in tensors(kind, torch.float32, 16)
    ]
    check_steps(*call, backend="triton", sizes=(1, 10, 14))
