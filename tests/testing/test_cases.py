"""Cases build what their description promises, the same every time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from csa_dispatch import Kind
from csa_dispatch.call_spec import spec_of
from csa_dispatch.testing import Case, build, to_call, visible_rows
from csa_dispatch.testing.cases import CONTENTS, MEMORY

VARIED = [
    Case(kind, dtype, 2, 4, 2, documents=documents, memory=memory, content=content, seed=7)
    for kind in Kind
    for documents in ("none", "cu_seqlens", "doc_ids")
    for memory in MEMORY
    for content, dtype in zip(CONTENTS, ["float32", "bfloat16", "float16"] * 2, strict=True)
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("case", VARIED[::7], ids=lambda case: case.name)
def test_building_twice_gives_the_same_bits(case):
    for one, other in zip(build(case), build(case), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(bits(one), bits(other))
            assert one.stride() == other.stride()
        else:
            assert one == other


def test_another_seed_gives_other_data():
    one, other = build(Case(seed=1)), build(Case(seed=2))
    assert not torch.equal(one.query, other.query)
    assert not torch.equal(one.kv_indices, other.kv_indices)


@pytest.mark.parametrize("case", VARIED, ids=lambda case: case.name)
def test_spec_is_that_of_the_built_call(case):
    inputs = build(case)
    assert case.spec() == spec_of(to_call(inputs), case.needs_grad)
    assert inputs.needs_grad == case.needs_grad


def test_names_are_unique():
    assert len({case.name for case in VARIED}) == len(VARIED)
    for field in dataclasses.fields(Case):
        changed = {"float": 2.0, "bool": True}.get(str(field.type).split(" ")[0])
        if changed is not None:
            altered = dataclasses.replace(Case(), **{field.name: changed})
            assert altered.name != Case().name


@pytest.mark.parametrize("documents", ["none", "cu_seqlens", "doc_ids"])
@pytest.mark.parametrize("content", ["poisoned", "messy"])
def test_poison_is_in_all_that_nobody_sees_and_nowhere_else(content, documents):
    inputs = build(Case(content=content, documents=documents, batch=2, window=0))
    call = to_call(inputs)
    assert call.sparse_kv is not None
    rows = visible_rows(call)
    largest = torch.finfo(call.query.dtype).max
    for b, tokens in enumerate(rows):
        seen = {j for row in tokens for j in row.pool}
        for j in range(call.sparse_kv.shape[2]):
            assert bool(call.sparse_kv[b, :, j].abs().lt(largest).all()) == (j in seen)
        assert not call.local_kv[b].abs().lt(largest).any()
        assert (call.local_kv[b].abs() == largest).any()
        for t, row in enumerate(tokens):
            assert bool(inputs.grad_output[b, :, t].isfinite().all()) == bool(row.pool)


def test_messy_slots_hold_every_kind_of_filler_and_repeats():
    indices = build(Case(tokens=200, slots=12)).kv_indices
    assert indices is not None
    found = set(indices.unique().tolist())
    assert {-(2**31), -2, -1, 20, 21, 27, 2147480000} <= found
    used = [row[(row >= 0) & (row < 20)] for row in indices[0]]
    assert any(len(row) > len(row.unique()) for row in used)
    assert any(len(row) == 0 for row in used)
    assert any(row[0] < 0 and (row[1:] >= 0).any() for row in indices[0])


def test_packed_documents_include_empty_ones_and_spare_rows():
    inputs = build(Case(documents="cu_seqlens"))
    assert inputs.cu_seqlens is not None
    assert inputs.cu_seqlens_k is not None
    assert (inputs.cu_seqlens.diff() == 0).any()
    assert int(inputs.cu_seqlens[-1]) < 33
    assert int(inputs.cu_seqlens_k[-1]) == 20


def test_memory_variants_have_the_strides_they_name():
    made = {name: build(Case(memory=name, batch=2, content="random")) for name in MEMORY}
    assert made["contiguous"].query.is_contiguous()
    assert made["transposed"].query.transpose(1, 2).is_contiguous()
    assert made["padded"].query.stride(2) == 69
    assert made["expanded"].local_kv.stride(0) == 0
    assert made["expanded"].grad_output.stride(1) == 0
    assert made["strided"].query.stride(3) == 2
    assert made["strided"].kv_indices is not None
    assert made["strided"].kv_indices.stride(2) == 2


def test_fields_a_kind_has_no_use_for_are_cleared():
    window = Case(kind=Kind.WINDOW)
    assert (window.pool, window.slots, window.index_dtype, window.compress_ratio) == (
        0, 0, "none", 0,
    )  # fmt: skip
    assert window.needs_grad == (True, True, False, True)
    assert Case(sink="none").needs_grad == (True, True, True, False)
    assert Case(documents="cu_seqlens", batch=4).batch == 1


@pytest.mark.parametrize("wrong", [{"heads": 3, "kv_heads": 2}, {"heads": 0}, {"content": "odd"}])
def test_impossible_cases_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Case(**wrong)
