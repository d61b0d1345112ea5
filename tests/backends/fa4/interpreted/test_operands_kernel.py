"""The Triton kernel writes what its PyTorch twin writes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from csa_backend_fa4 import backend
from csa_backend_fa4.operands import torch_operands
from csa_backend_fa4.operands_kernel import write_operands

from csa_dispatch import slot_layout
from csa_dispatch.call import Kind, token_bounds
from csa_dispatch.testing import Case, build, cases_for, to_call

SIZES = {
    "tokens": (1, 21),
    "heads": (1,),
    "window": (0, 1, 5, 140),
    "pool": (20, 3),
    "slots": (9, 130),
    "batch": (1, 3),
    "needs_grad": ((False,) * 4,),
}

CASES = [
    *cases_for(
        backend.forward_capabilities, device_type="cuda", capability=100, axes=SIZES, strength=1
    ),
    # The pairs that the kernel's branches join: what is selected, by documents and index width.
    *(
        Case(kind, "bfloat16", 1, 1, documents=documents, index_dtype=index, head_dim=512)
        for kind in Kind
        for documents in ("none", "cu_seqlens", "doc_ids")
        for index in (("int32", "int64") if kind is Kind.GATHER else ("none",))
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_and_twin_agree(case: Case, device: str):
    call = to_call(build(case, device))
    layout, bounds = slot_layout(call), token_bounds(call)
    ours, twin = write_operands(call, layout, bounds), torch_operands(call, layout, bounds)
    assert torch.equal(ours.indices, twin.indices)
    assert torch.equal(ours.table.view(torch.int16), twin.table.view(torch.int16))


def test_indices_beyond_32_bits_are_unused_not_wrapped(device: str):
    inputs = build(Case(head_dim=512, dtype="bfloat16", tokens=2, index_dtype="int64"), device)
    assert inputs.kv_indices is not None
    call = to_call(inputs._replace(kv_indices=torch.full_like(inputs.kv_indices, 2**32 + 1)))
    layout = slot_layout(call)
    assert write_operands(call, layout, None).indices[..., layout.window :].eq(-1).all()
