"""Faults of operations beside attention are each caught and named."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch import (
    CompressorCall,
    CompressorCapabilities,
    IndexerCall,
    IndexerCapabilities,
    OneOf,
    Operation,
    backends,
)
from csa_dispatch.testing import PlainBackend, check_backend
from csa_dispatch.testing.indexer import INDEXER_MUTANTS


def eager(operation: str) -> Operation:
    backend = backends()["eager"].backend
    assert backend is not None
    return backend.operations[operation]


class Indexer(Operation):
    """Eager's indexer, for faults to be made in."""

    name = "lightning_indexer"
    forward_capabilities = IndexerCapabilities(dtype=OneOf(("float32",), others=("float64",)))

    def forward(self, call: IndexerCall) -> Tensor:
        return eager(self.name).forward(call)


class Compressor(Operation):
    """Eager's compressor."""

    name = "compress_kv"
    forward_capabilities = CompressorCapabilities(dtype=OneOf(("float32",), others=("float64",)))
    backward_capabilities = forward_capabilities

    def forward(self, call: CompressorCall) -> Tensor:
        return eager(self.name).forward(call)

    def backward(self, call: CompressorCall, *saved: Any) -> Any:
        return eager(self.name).backward(call, *saved)


class OneTooEarly(Indexer):
    def forward(self, call: IndexerCall) -> Tensor:
        return INDEXER_MUTANTS["one entry too early"](call)


class OneDocument(Indexer):
    def forward(self, call: IndexerCall) -> Tensor:
        return INDEXER_MUTANTS["documents ignored"](call)


class WritesItsKeys(Indexer):
    def forward(self, call: IndexerCall) -> Tensor:
        picks = super().forward(call)
        call.index_keys.mul_(2)
        return picks


class WritesBesideItsWeights(Indexer):
    def forward(self, call: IndexerCall) -> Tensor:
        weights = call.weights
        steps = zip(weights.shape, weights.stride(), strict=True)
        last = weights.storage_offset() + sum((size - 1) * step for size, step in steps)
        torch.as_strided(weights, (1,), (1,), last + 1).zero_()
        return super().forward(call)


class LeavesPaddingUnwritten(Indexer):
    def forward(self, call: IndexerCall) -> Tensor:
        picks = super().forward(call)
        return torch.where(picks >= 0, picks, torch.empty_like(picks))


class InAnyOrder(Indexer):
    """The order of atomic counters, in miniature."""

    def forward(self, call: IndexerCall) -> Tensor:
        picks = super().forward(call)
        if call.topk > 1 and torch.rand(()) < 0.5 and bool((picks >= 0).all(-1).any()):
            whole = (picks >= 0).all(-1, keepdim=True)
            picks = torch.where(whole, picks.flip(-1), picks)
        return picks


class ClaimsTooMuch(Indexer):
    class Accepts(OneOf):
        def __contains__(self, value: object) -> bool:
            return True

    forward_capabilities = IndexerCapabilities(dtype=Accepts(("float32",), others=("bfloat16",)))


class NotesAreOneString(Indexer):
    def notes(self, spec: Any) -> Any:
        return "copies everything"


class IgnoresDocuments(Compressor):
    def forward(self, call: CompressorCall) -> Tensor:
        return super().forward(call._replace(cu_seqlens=None, cu_seqlens_k=None))


class HalvesGates(Compressor):
    def backward(self, call: CompressorCall, *saved: Any) -> Any:
        values, gates, bias = super().backward(call, *saved)
        return values, None if gates is None else gates / 2, bias


class GivesGradientsNobodyAsked(Compressor):
    def backward(self, call: CompressorCall, *saved: Any) -> Any:
        return super().backward(call, saved[0], (True, True, True))


class KeepsOverflowing(Compressor):
    def forward(self, call: CompressorCall) -> Tensor:
        largest = call.gates.nan_to_num(0).abs().max()
        return super().forward(call) * (torch.nan if largest > 100 else 1)


EXPECTED = [
    (OneTooEarly, "lightning_indexer", "picks"),
    (OneDocument, "lightning_indexer", "packed"),
    (WritesItsKeys, "lightning_indexer", "index_keys was written to"),
    (WritesBesideItsWeights, "lightning_indexer", "wrote beside weights"),
    (LeavesPaddingUnwritten, "lightning_indexer", "picks, then -1"),
    (InAnyOrder, "lightning_indexer", "of 10 runs differ from the first"),
    (ClaimsTooMuch, "operations", "dtype=bfloat16: no bound refuses it"),
    (NotesAreOneString, "operations", "not a tuple of str"),
    (IgnoresDocuments, "compress_kv", "entries"),
    (HalvesGates, "compress_kv", "dgates: uses"),
    (GivesGradientsNobodyAsked, "compress_kv", "was not asked for"),
    (KeepsOverflowing, "compress_kv", "large-gates"),
]


def backend_with(name: str, operation: Operation) -> PlainBackend:
    backend = PlainBackend()
    backend.operations = MappingProxyType({name: operation})
    return backend


@pytest.mark.parametrize(
    ("kind", "check", "message"), EXPECTED, ids=[kind.__name__ for kind, _, _ in EXPECTED]
)
def test_each_fault_fails_its_check_and_is_named(kind: type, check: str, message: str):
    report = check_backend(backend_with(kind.name, kind()), checks=[check])
    (failed,) = report.failures
    assert failed.name == check
    assert message in failed.message


@pytest.mark.parametrize("kind", [Indexer, Compressor])
def test_a_right_operation_passes_and_the_absent_one_is_unsupported(kind: type):
    names = ["operations", "lightning_indexer", "compress_kv"]
    report = check_backend(backend_with(kind.name, kind()), checks=names)
    found = {item.name: item.status for item in report.checks}
    other = ({"lightning_indexer", "compress_kv"} - {kind.name}).pop()
    assert found["operations"] == found[kind.name] == "pass"
    assert found[other] == "unsupported"


def test_an_operation_that_nothing_dispatches_is_named():
    report = check_backend(backend_with("indexer", Indexer()), checks=["operations"])
    assert "indexer: is none of attention, compress_kv, lightning_indexer" in str(report)


def test_cases_take_head_counts_and_head_dims_that_are_claimed():
    seen = set()

    class Narrow(Indexer):
        forward_capabilities = IndexerCapabilities(
            dtype=OneOf(("bfloat16",)), heads=OneOf((8, 16)), head_dim=OneOf((24,))
        )

        def forward(self, call: IndexerCall) -> Tensor:
            seen.add((call.index_query.shape[1], call.index_query.shape[3]))
            return super().forward(call)

    backend = backend_with("lightning_indexer", Narrow())
    check_backend(backend, checks=["lightning_indexer"]).raise_if_failed()
    assert seen == {(8, 24)}
