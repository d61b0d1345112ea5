"""FlexAttention agrees with the oracle, gathers by index included."""

from __future__ import annotations

import pytest
import torch.nn.attention.flex_attention as flex

from csa_dispatch import Kind
from csa_dispatch.testing import Case, judge, reference_for
from csa_dispatch.testing.flex_reference import flex_forward


@pytest.mark.parametrize("documents", ["none", "cu_seqlens", "doc_ids"])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("content", ["messy", "duplicates"])
def test_flex_attention_and_the_oracle_agree(
    kind: Kind, documents: str, content: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    case = Case(
        kind,
        batch=2,
        kv_heads=2,
        head_dim=16,
        documents=documents,
        content=content,
        needs_grad=(False,) * 4,
    )
    reference = reference_for(case)
    output, lse = flex_forward(reference.call)
    for name, tensor in (("output", output), ("lse", lse)):
        verdict = judge(reference.targets[name], tensor)
        assert verdict.passed, f"{name}: {verdict.message}"


def test_a_selection_counts_as_often_as_it_occurs():
    case = Case(slots=3, tokens=5, head_dim=16, content="random", needs_grad=(False,) * 4)
    call = reference_for(case).call
    assert call.kv_indices is not None
    twice = call._replace(kv_indices=call.kv_indices[..., [0, 0, 1]])
    once = call._replace(kv_indices=call.kv_indices[..., [0, 1]])
    assert (flex_forward(twice)[1] > flex_forward(once)[1]).all()
