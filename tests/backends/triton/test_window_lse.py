"""The kernels differentiate a part of the keys from the whole softmax's output and lse."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch import attention
from csa_dispatch.functional import attention_with_window_lse


@pytest.mark.parametrize("kind", ["gather", "dense"])
def test_parts_have_the_gradients_of_the_whole(kind: str, device: str) -> None:
    torch.manual_seed(0)
    shapes = {"query": (1, 4, 9, 64), "local_kv": (1, 1, 9, 64), "sparse_kv": (1, 1, 4, 64)}
    tensors = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    tensors["attention_sink"] = torch.tensor([0.5, -1.0, 3.0, -torch.inf], device=device)
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    choice = (
        {"kv_indices": torch.randint(-1, 4, (1, 9, 3), device=device)}
        if kind == "gather"
        else {"compress_ratio": 2}
    )
    arguments = {**tensors, **choice, "sliding_window_size": 3, "backend": "triton"}
    whole, lse = attention(**arguments, return_lse=True)  # pyright: ignore
    parts = attention_with_window_lse(**arguments)  # pyright: ignore[reportArgumentType]
    grad = torch.randn_like(whole)
    torch.testing.assert_close(parts.lse, lse, rtol=1e-6, atol=1e-6)
    for one, other in zip(
        (parts.output, *torch.autograd.grad(parts.output, leaves, grad)),
        (whole, *torch.autograd.grad(whole, leaves, grad)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
