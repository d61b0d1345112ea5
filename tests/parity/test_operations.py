"""The indexer's group of a matrix: what runs, what is refused, and that it can fail."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from torch import Tensor

from csa_dispatch import IndexerCall, IndexerCapabilities, Operation
from csa_dispatch.parity.matrix import MatrixError, parse_matrix
from csa_dispatch.parity.report_html import html_text
from csa_dispatch.parity.results import Status
from csa_dispatch.parity.runner import run_matrix
from csa_dispatch.testing import PlainBackend
from csa_dispatch.testing.indexer import INDEXER_MUTANTS, Run

GROUP = {"name": "picks", "source": "indexer", "dtypes": ["float32"]}
MATRIX = parse_matrix({"name": "indexer", "group": [GROUP]}, "here")


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


def test_a_group_of_another_source_has_no_dtypes() -> None:
    with pytest.raises(MatrixError, match='source = "field" or "indexer"'):
        parse_matrix({"name": "x", "group": [{**GROUP, "source": "boundaries"}]}, "here")
