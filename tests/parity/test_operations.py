"""Groups of other operations in a matrix: what runs, what is refused, and that they can fail."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from csa_backend_eager.compressor import EagerCompressor
from torch import Tensor

from csa_dispatch import (
    CompressorCall,
    CompressorCapabilities,
    IndexerCall,
    IndexerCapabilities,
    Operation,
)
from csa_dispatch.parity.matrix import MatrixError, parse_matrix
from csa_dispatch.parity.report_html import html_text
from csa_dispatch.parity.results import Status
from csa_dispatch.parity.runner import run_matrix
from csa_dispatch.testing import PlainBackend
from csa_dispatch.testing.compressor import compressor_oracle
from csa_dispatch.testing.compressor_cases import (
    CompressorCase,
    build_compressor,
    compressor_cases,
)
from csa_dispatch.testing.indexer import INDEXER_MUTANTS, Run

GROUP = {"name": "picks", "source": "indexer", "dtypes": ["float32"]}
MATRIX = parse_matrix({"name": "indexer", "group": [GROUP]}, "here")


ENTRIES = parse_matrix(
    {"name": "c", "group": [{"name": "entries", "source": "compressor", "dtypes": ["bfloat16"]}]},
    "here",
)


class Mutant(Operation):
    forward_capabilities = IndexerCapabilities()

    def __init__(self, run: Run) -> None:
        self._run = run

    def forward(self, call: IndexerCall) -> Tensor:
        return self._run(call)


def test_backends_that_have_an_indexer_run_every_case_they_claim() -> None:
    run = run_matrix(MATRIX, backends=["eager", "attention_gym", "fa4"], required=["eager"])
    assert run.exit_code == 0
    assert {report.cell.entry.forward for report in run.reports} == {"eager", "attention_gym"}
    ran = [report for report in run.reports if report.status is Status.PASS]
    assert ran
    assert all(report.receipts == (f"forward {report.cell.entry}",) for report in ran)
    assert run.tensors[-1] == "picks"
    assert "picks" in html_text(run)


@pytest.mark.parametrize("fault", ["relu dropped", "one entry too early", "documents ignored"])
def test_a_backend_with_a_fault_fails(registered: Any, fault: str) -> None:
    backend = PlainBackend()
    backend.operations = MappingProxyType({"lightning_indexer": Mutant(INDEXER_MUTANTS[fault])})
    registered(backend)
    run = run_matrix(MATRIX, backends=["plain"])
    assert run.exit_code == 1
    assert all(report.message for report in run.failures)


def test_backends_that_have_a_compressor_run_forward_and_backward() -> None:
    run = run_matrix(ENTRIES, backends=["eager", "attention_gym"], required=["eager"])
    assert run.exit_code == 0
    assert {report.cell.entry.forward for report in run.reports} == {"eager"}
    receipts = {report.cell.name: report.receipts for report in run.reports}
    assert receipts["overlapping-bfloat16"] == ("forward eager", "backward eager")
    assert receipts["no-gradient-bfloat16"] == ("forward eager",)
    assert run.tensors[-4:] == ["entries", "dvalues", "dgates", "dposition_bias"]


def test_a_compressor_that_rounds_its_position_bias_fails(registered: Any) -> None:
    class Rounded(Operation):
        forward_capabilities = CompressorCapabilities()
        backward_capabilities = CompressorCapabilities()

        def forward(self, call: CompressorCall) -> Tensor:
            return eager.forward(call._replace(position_bias=call.position_bias.bfloat16()))

        def backward(self, call: CompressorCall, *saved: Any) -> Any:
            return eager.backward(call, *saved)

    eager = EagerCompressor()
    backend = PlainBackend()
    backend.operations = MappingProxyType({"compress_kv": Rounded()})
    registered(backend)
    run = run_matrix(ENTRIES, backends=["plain"])
    assert run.exit_code == 1
    assert any("entries: uses" in report.message for report in run.failures)


@pytest.mark.parametrize("case", compressor_cases(("float32",)), ids=lambda case: case.name)
def test_the_compressors_cases_hold_nan_where_nothing_may_read_and_nowhere_else(
    case: CompressorCase,
) -> None:
    call, grad_entries, _ = build_compressor(case)
    oracle = compressor_oracle(call, grad_entries)
    assert all(bool(result.isfinite().all()) for result in oracle.exact)
    unread = (oracle.unused.values, oracle.unused.gates)
    for tensor, unused in zip((call.values, call.gates), unread, strict=True):
        assert torch.equal(tensor.isnan(), unused)


def test_a_group_of_another_source_has_no_dtypes() -> None:
    with pytest.raises(MatrixError, match='source = "field", "indexer" or'):
        parse_matrix({"name": "x", "group": [{**GROUP, "source": "boundaries"}]}, "here")
