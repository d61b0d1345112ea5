"""Layouts are views: same numbers in every dimension order, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch import attention
from tests.core.probes import inputs

QUERY = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3)}


def moved(layout: str, shared: bool, **made: Any) -> dict[str, Any]:
    """BHSD tensors as contiguous leaves in ``layout``."""

    def place(name: str, tensor: Tensor) -> Tensor:
        if name in ("kv_indices", "doc_ids"):
            result = tensor[0] if layout == "THD" else tensor
        elif tensor.ndim != 4:
            result = tensor
        elif layout == "THD":
            result = tensor[0].permute(1, 0, 2)
        else:
            result = tensor.permute(QUERY[layout])
        if shared and name in ("local_kv", "sparse_kv") and layout != "BHSD":
            result = result.squeeze({"BSHD": 2, "SBHD": 2, "THD": 1}[layout])
        result = result.detach().clone(memory_format=torch.contiguous_format)
        return result.requires_grad_(result.is_floating_point())

    return {name: place(name, tensor) for name, tensor in made.items()}


@pytest.mark.parametrize("documents", ["none", "cu_seqlens", "doc_ids"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "SBHD", "THD"])
def test_layouts_agree_in_output_lse_and_gradients(
    layout: str, shared: bool, documents: str
) -> None:
    packed: dict[str, Any] = {}
    made: dict[str, Any] = inputs(batch=1)._asdict()
    if documents == "cu_seqlens":
        packed["cu_seqlens"] = torch.tensor([0, 3, 8], dtype=torch.int32)
        packed["cu_seqlens_k"] = torch.tensor([0, 2, 6], dtype=torch.int32)
    elif documents == "doc_ids":
        made["doc_ids"] = torch.tensor([[0, 0, 0, 4, 4, 4, 4, 9]])
    plain = moved("BHSD", False, **made)
    other = moved(layout, shared, **made)
    expected, expected_lse = attention(**plain, **packed, sliding_window_size=3, return_lse=True)
    output, lse = attention(
        **other, **packed, sliding_window_size=3, return_lse=True, layout=layout
    )
    assert output.shape == other["query"].shape
    expected.square().sum().backward()
    output.square().sum().backward()

    def back(tensor: Tensor) -> Tensor:
        if layout == "THD":
            return tensor.permute(1, 0, 2)[None]
        inverse = torch.tensor(QUERY[layout]).argsort().tolist()
        return tensor.permute(inverse)

    torch.testing.assert_close(back(output), expected)
    torch.testing.assert_close(lse[None] if layout == "THD" else lse, expected_lse)
    for name in ("query", "local_kv", "sparse_kv", "attention_sink"):
        got, wanted = other[name].grad, plain[name].grad
        assert got.shape == other[name].shape
        if name == "query":
            got = back(got)
        torch.testing.assert_close(got.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("layout", ["BSHD", "SBHD", "THD"])
def test_output_has_the_querys_memory_order(layout: str) -> None:
    made = moved(layout, True, **inputs()._asdict())
    output = attention(**made, sliding_window_size=3, layout=layout)
    assert output.stride() == made["query"].stride()
