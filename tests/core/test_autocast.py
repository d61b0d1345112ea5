"""Backends never run under the caller's autocast, forward or backward."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch import Call, Kind, attention, backends
from csa_dispatch.testing import Case, attention_run, check_case, reference_for
from tests.core.probes import WindowBackend


class Witness(WindowBackend):
    """Notes whether autocast was on when it ran."""

    def __init__(self) -> None:
        super().__init__("witness")
        self.seen: list[bool] = []

    def forward(self, call: Call):
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().forward(call)

    def backward(self, call, output, lse, grad_output, needs):
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().backward(call, output, lse, grad_output, needs)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_off_where_a_backend_runs(registered, compiled: bool):
    witness = registered(Witness())
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    key = torch.randn(1, 1, 5, 8)
    call = torch.compile(attention, backend="eager") if compiled else attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(query, key, sliding_window_size=3, backend="witness")
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert witness.seen == [False, False]


@pytest.mark.parametrize("kind", tuple(Kind))
@pytest.mark.parametrize("name", ["eager", "attention_gym"])
def test_results_under_autocast_lie_within_their_budgets(name: str, kind: Kind):
    if not backends()[name].available:
        pytest.skip(f"{name} is not here")
    case = Case(kind=kind, dtype="bfloat16", tokens=9, head_dim=16)
    reference = reference_for(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = check_case(case, attention_run(name), reference=reference)
    assert result.status == "pass", result.message


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_autocast_does_not_make_a_wrong_dtype_right(dtype: torch.dtype):
    query, key = torch.randn(1, 2, 5, 8), torch.ones(1, 1, 5, 8, dtype=dtype)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="local_kv is torch"),
    ):
        attention(query, key)
