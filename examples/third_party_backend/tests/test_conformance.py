"""The backend keeps csa-dispatch's contract."""

from __future__ import annotations

import torch
from csa_rowwise import backend

import csa_dispatch
from csa_dispatch.testing import check_backend


def test_backend_passes_the_conformance_kit():
    report = check_backend(backend)
    print(report)
    report.raise_if_failed()


def test_the_installed_package_is_what_attention_runs():
    query, kv = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    with csa_dispatch.record_receipts() as receipts:
        csa_dispatch.attention(query, kv, sliding_window_size=3, backend="rowwise")
    assert [receipt.backend for receipt in receipts] == ["rowwise"]
    assert csa_dispatch.backends()["rowwise"].backend is backend
