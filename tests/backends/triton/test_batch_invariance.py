"""What docs/pytorch.md says of the Triton kernels and batch invariance."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch.call import Kind
from tests.frameworks.neighbours import neighbours

QUERY_SIDE = {"output", "lse", "query"}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/frameworks_cuda.py looks at GPUs"
)


@pytest.mark.parametrize(("kind", "heads"), [(Kind.GATHER, 4), (Kind.WINDOW, 64)])
def test_query_side_has_the_same_bits_in_any_batch_slot_and_packed(kind: Kind, heads: int) -> None:
    """These tiles hold one token each; several tokens a tile would depend on what is packed."""
    found = neighbours("triton", kind, heads)
    assert found.in_a_batch >= QUERY_SIDE
    assert found.packed >= QUERY_SIDE


def test_few_heads_have_the_same_bits_in_any_batch_slot() -> None:
    assert neighbours("triton", Kind.DENSE, 4).in_a_batch >= QUERY_SIDE
