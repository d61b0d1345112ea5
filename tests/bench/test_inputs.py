"""The data of a benchmarked call is what its name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.bench.suite import BenchCase, parse_suite
from csa_dispatch.call import Kind

CPU = torch.device("cpu")


def case_of(**fields: Any) -> BenchCase:
    base = {"name": "it", "heads": 2, "head_dim": 16, "tokens": 40, "slots": 6, "window": 4}
    return parse_suite({"name": "one", "case": [base | fields]}, "one.toml").cases[0]


def indices_of(**fields: Any) -> Tensor:
    indices = build_inputs(case_of(**fields), CPU).call.kv_indices
    assert indices is not None
    return indices


def test_full_slots_are_distinct_valid_rows() -> None:
    indices = indices_of(indices="full", batch=2)
    assert indices.shape == (2, 40, 6)
    assert ((indices >= 0) & (indices < 10)).all()
    assert all(len(set(row.tolist())) == 6 for row in indices.flatten(0, 1))


def test_causal_slots_are_complete_entries_and_none_is_left_out() -> None:
    indices = indices_of(indices="causal", batch=2)
    for rows in indices:
        for t, row in enumerate(rows.tolist()):
            used = [index for index in row if index >= 0]
            complete = (t + 1) // 4
            assert all(index < complete for index in used)
            assert len(set(used)) == len(used) == min(6, complete)


def test_messy_slots_hold_every_kind_of_nuisance() -> None:
    indices = indices_of(indices="messy", tokens=400, slots=20)
    assert (indices[..., ::7] == -1).all()
    others = indices[..., [i for i in range(20) if i % 7]]
    assert (others >= 100).any()
    assert (others == -1).any()
    repeats = [len(row) - len(set(row)) for row in others[0].tolist()]
    assert sum(repeats) > 0


@pytest.mark.parametrize("indices", ["full", "causal", "messy"])
def test_slots_beyond_the_pool_are_unused(indices: str) -> None:
    found = indices_of(indices=indices, slots=13, tokens=8, index_dtype="int64")
    assert found.dtype == torch.int64
    assert (found[..., 2:7] <= 7).all()
    assert (found[..., 8:] == -1).all() or indices == "messy"


def test_chunks_of_tokens_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csa_dispatch.bench.inputs._CHUNK_ELEMENTS", 70)  # 7 tokens
    test_causal_slots_are_complete_entries_and_none_is_left_out()


def test_the_seed_decides_everything() -> None:
    first, again = (build_inputs(case_of(seed=3), CPU) for _ in range(2))
    other = build_inputs(case_of(seed=4), CPU)
    for name in ("query", "local_kv", "sparse_kv", "kv_indices", "attention_sink"):
        assert torch.equal(getattr(first.call, name), getattr(again.call, name))
        assert not torch.equal(getattr(first.call, name), getattr(other.call, name))
    assert torch.equal(first.grad_output, again.grad_output)


def test_each_kind_is_the_call_it_names() -> None:
    for kind in Kind:
        call = build_inputs(case_of(kind=kind.value, sink="none"), CPU).call
        assert call.kind is kind
        assert call.attention_sink is None
        assert (call.compress_ratio is not None) == (kind is Kind.DENSE)
