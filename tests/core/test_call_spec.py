"""The strides field of a spec, against its definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from csa_dispatch.call_spec import stride_class

SHAPES = list(itertools.product((0, 1, 2), (1, 3), (0, 1, 4), (1, 2, 5, 8)))
ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (2, 1, 0, 3))


def defined(tensor: Tensor, start: int) -> str:
    """What CallSpec says of ``strides``, for a tensor that begins ``start`` bytes into memory."""
    size = tensor.element_size()
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return "any"
    steps = [
        stride * size
        for stride, count in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if count > 1
    ]
    return "unit" if any(place % 16 for place in (start, *steps)) else "aligned"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_the_class_of_strides_is_as_defined(dtype: torch.dtype, device: str) -> None:
    real = torch.empty(4096, dtype=dtype)
    assert real.data_ptr() % 16 == 0
    memory = FakeTensorMode().from_tensor(real) if device == "fake" else real.to(device)
    found = set()
    for shape, offset, order in itertools.product(SHAPES, (0, 1, 4, 8), ORDERS):
        flat = memory[offset : offset + math.prod(shape)]
        tensor = flat.view(shape).permute(order)
        # No memory, no address.
        empty = device == "cpu" and not tensor.numel()
        wanted = defined(tensor, 0 if empty else offset * tensor.element_size())
        assert stride_class(tensor) == wanted, (shape, offset, order)
        found.add(wanted)
    assert found == {"aligned", "unit", "any"}


def test_the_class_is_that_of_the_worst_tensor() -> None:
    whole = torch.empty(2, 4, 8, dtype=torch.float16)
    unit, mixed = whole.flatten()[1:17].view(1, 2, 8), whole.transpose(1, 2)
    assert [stride_class(tensor) for tensor in (whole, unit, mixed)] == ["aligned", "unit", "any"]
    for worse, name in ((unit, "unit"), (mixed, "any")):
        for place in range(3):
            tensors: list[Tensor | None] = [whole, None, whole]
            tensors[place] = worse
            assert stride_class(*tensors) == name
