"""What docs/pytorch.md says of batch invariance; of the Triton kernels, see their own tests."""

from __future__ import annotations

import pytest

from csa_dispatch.call import Kind
from tests.frameworks.neighbours import Results, neighbours

EVERYTHING = set(Results._fields)


@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("backend", ["eager", "attention_gym"])
def test_a_document_has_the_same_bits_in_any_batch_slot(
    backend: str, kind: Kind, heads: int
) -> None:
    assert neighbours(backend, kind, heads).in_a_batch == EVERYTHING
