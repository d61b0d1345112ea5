"""The chunked reference is the oracle's, budgets included, and does not go unwatched."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch import Kind
from csa_dispatch.parity import reference as module
from csa_dispatch.parity.reference import chunked_reference, exact_chunked, vouch
from csa_dispatch.testing import Case, build, reference_for, to_call

CASES = [
    Case(content="messy", tokens=21, heads=6, kv_heads=2, head_dim=16),
    Case(content="messy", tokens=21, documents="cu_seqlens", dtype="bfloat16", head_dim=16),
    Case(content="poisoned", kind=Kind.DENSE, documents="doc_ids", batch=2, head_dim=8),
    Case(content="duplicates", sink="none", dtype="float16", head_dim=24, index_dtype="int64"),
    Case(content="messy", kind=Kind.WINDOW, documents="cu_seqlens", head_dim=16),
    Case(content="messy", window=0, documents="cu_seqlens", needs_grad=(False,) * 4, head_dim=8),
    Case(content="random", kind=Kind.WINDOW, window=0, head_dim=8),
    Case(content="scattered", memory="strided", scale=0.7, dtype="float64", head_dim=16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_target_is_the_oracles(case: Case, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 4000)
    found = chunked_reference(case, "cpu", 4).targets
    wanted = reference_for(case, "cpu").targets
    assert list(found) == list(wanted)
    for name, target in wanted.items():
        mine = found[name]
        assert (mine.dtype, mine.relative) == (target.dtype, target.relative), name
        torch.testing.assert_close(mine.value, target.value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine.plain, target.plain, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(
            mine.zero.expand(mine.value.shape), target.zero.expand(mine.value.shape)
        )
        assert mine.epsilon_frobenius == pytest.approx(target.epsilon_frobenius, rel=1e-9)
        assert mine.epsilon_max == pytest.approx(target.epsilon_max, rel=1e-9)


@pytest.mark.parametrize("name", ["output", "lse", "dquery"])
def test_the_oracle_vouches_for_the_rows_it_is_shown(name: str):
    inputs = build(CASES[0])
    call = to_call(inputs)
    exact = exact_chunked(call, inputs.grad_output)
    vouch(call, inputs.grad_output, exact, 4)
    assert exact.gradients is not None
    tensor = {"output": exact.output, "lse": exact.lse, "dquery": exact.gradients.query}[name]
    assert tensor is not None
    tensor[0, 1, -1] += 1e-6
    with pytest.raises(ArithmeticError, match=f"{name} is not the oracle's"):
        vouch(call, inputs.grad_output, exact, 4)
