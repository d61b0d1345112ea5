"""``attention_with_window_lse``: one attention, its window's lse beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from csa_backend_eager import backend as eager
from torch import Tensor

from csa_dispatch import BackendRefused, attention
from csa_dispatch.call import Gradients, Kind
from csa_dispatch.functional import AttentionWithWindowLse, attention_with_window_lse
from csa_dispatch.testing import Case, Inputs, Outcome, cases_for, check_case

SIZES = {
    "kind": (Kind.GATHER, Kind.DENSE),
    "tokens": (1, 5, 33),
    "heads": (4, 6),
    "head_dim": (16,),
    "window": (0, 1, 8),
    "deterministic": (False,),
}
NAMES = ("query", "local_kv", "sparse_kv", "attention_sink")


def run(inputs: Inputs) -> Outcome:
    found = attention_with_window_lse(*inputs[:5], **keywords_of(inputs))
    wanted = [getattr(inputs, name) for name in NAMES]
    leaves = [item for item in wanted if item is not None and item.requires_grad]
    made: Iterator[Tensor] = iter(())
    if leaves:
        made = iter(torch.autograd.grad(found.output, leaves, inputs.grad_output))
    gradients = [next(made) if need else None for need in inputs.needs_grad]
    return Outcome(found.output.detach(), found.lse, Gradients(*gradients))


def keywords_of(inputs: Inputs) -> dict[str, Any]:
    names = ("cu_seqlens", "cu_seqlens_k", "doc_ids", "sliding_window_size", "compress_ratio")
    return {name: getattr(inputs, name) for name in (*names, "scale")}


@pytest.mark.parametrize(
    "case",
    cases_for(eager.forward_capabilities, eager.backward_capabilities, axes=SIZES, strength=1),
    ids=lambda case: case.name,
)
def test_output_lse_and_gradients_are_attentions(case: Case) -> None:
    """Within the budgets of one fused call: each rounds the output once more."""
    result = check_case(case, run)
    assert result.status == "pass", result.message


def draw(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors: dict[str, Any] = {
        "query": torch.randn(2, 4, 12, 8),
        "local_kv": torch.randn(2, 1, 12, 8),
        "sparse_kv": torch.randn(2, 1, 5, 8),
        "attention_sink": torch.tensor([math.inf, -math.inf, 0.5, 3.0]),
    }
    leaves = {name: item.to(dtype).requires_grad_() for name, item in tensors.items()}
    return {**leaves, "kv_indices": torch.randint(-1, 5, (2, 12, 3)), "sliding_window_size": 4}


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "SBHD"])
def test_window_lse_is_that_of_a_window_only_call(layout: str) -> None:
    there, back = {
        "BHSD": ((0, 1, 2, 3), (0, 1, 2)),
        "BSHD": ((0, 2, 1, 3), (0, 1, 2)),
        "SBHD": ((2, 0, 1, 3), (0, 1, 2)),
    }[layout]
    arguments = draw()
    for name in NAMES[:3]:
        arguments[name] = arguments[name].permute(there)
    found = attention_with_window_lse(**arguments, layout=layout)
    del arguments["sparse_kv"], arguments["kv_indices"]
    output, lse = attention(**arguments, layout=layout, return_lse=True)
    assert torch.equal(found.window_lse, lse)
    assert found.output.shape == output.shape
    assert found.window_lse.permute(back).shape == (2, 4, 12)


def test_without_a_window_it_is_the_sink() -> None:
    arguments = {**draw(), "sliding_window_size": 0}
    found = attention_with_window_lse(**arguments)
    assert torch.equal(found.window_lse, arguments["attention_sink"][:, None].expand(2, 4, 12))
    arguments["attention_sink"] = None
    assert bool((attention_with_window_lse(**arguments).window_lse == -math.inf).all())


def test_it_stays_exact_where_the_entries_draw_nearly_all() -> None:
    """There lse and the selected logits are one number in fp32, and their difference nothing."""
    query = torch.full((1, 1, 1, 4), 5.0)
    entries = torch.full((1, 1, 1, 4), 5.0)
    local = -0.1 * entries
    found = attention_with_window_lse(
        query, local, entries, torch.zeros(1, 1, 1, dtype=torch.int32), scale=1.0
    )
    assert float(found.lse) == 100.0
    assert float(found.window_lse) == pytest.approx(-10.0, abs=1e-5)


def compiled(arguments: dict[str, Any], **more: Any) -> AttentionWithWindowLse:
    return attention_with_window_lse(**arguments, **more)


def test_it_compiles_without_a_graph_break() -> None:
    arguments = draw()
    function = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    leaves = [arguments[name] for name in NAMES]
    for one, other in zip(
        torch.autograd.grad(function(arguments).output.sum(), leaves),
        torch.autograd.grad(attention_with_window_lse(**arguments).output.sum(), leaves),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_it_agrees_with_the_oracle_in_bfloat16() -> None:
    arguments = {
        name: item.detach() if isinstance(item, Tensor) else item
        for name, item in draw(torch.bfloat16).items()
    }
    found = attention_with_window_lse(**arguments)
    _, call_lse = attention(**arguments, return_lse=True)
    torch.testing.assert_close(found.lse, call_lse, rtol=1e-6, atol=1e-6)
    wide = {
        name: item.double() if isinstance(item, Tensor) and item.is_floating_point() else item
        for name, item in arguments.items()
    }
    exact = attention(**wide)
    assert float((found.output - exact).norm() / exact.norm()) < 2**-8


def test_a_backward_that_does_not_use_lse_is_refused() -> None:
    arguments = draw(torch.float32)
    with pytest.raises(BackendRefused, match="attention_gym"):
        attention_with_window_lse(**arguments, backward_backend="attention_gym")
    with torch.no_grad():
        attention_with_window_lse(**arguments, backward_backend="attention_gym")


def test_without_entries_it_says_what_to_call() -> None:
    arguments = draw()
    arguments["sparse_kv"] = None
    for window in (False, 0.0):
        with pytest.raises(TypeError, match=f"sliding_window_size is {window}"):
            attention_with_window_lse(**{**draw(), "sliding_window_size": window})
    with pytest.raises(ValueError, match=r"sparse_kv is None.*attention\(\)'s lse"):
        attention_with_window_lse(**arguments)
