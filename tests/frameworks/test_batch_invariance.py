"""What docs/pytorch.md says of batch invariance; of the Triton kernels, see their own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from csa_dispatch.call import Kind
from tests.frameworks.neighbours import Results, neighbours

EVERYTHING = set(Results._fields)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch uses, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("backend", ["eager", "attention_gym"])
def test_a_document_has_the_same_bits_in_any_batch_slot(
    backend: str, kind: Kind, heads: int, threads: Callable[[int], None]
) -> None:
    threads(1)
    assert neighbours(backend, kind, heads).in_a_batch == EVERYTHING


@pytest.mark.parametrize("kind", list(Kind))
def test_threads_may_change_the_bits_of_kv_gradients_alone(
    kind: Kind, threads: Callable[[int], None]
) -> None:
    threads(2)
    kept = neighbours("eager", kind, 4).in_a_batch
    assert kept >= {"output", "lse", "query"}
    assert neighbours("attention_gym", kind, 4).in_a_batch == EVERYTHING
