"""G25, G26, G27: what is differentiable, with which upstreams, and how often; determinism."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor

from csa_dispatch import BackendRefused, attention
from csa_dispatch.call_spec import GRADIENT_INPUTS
from csa_dispatch.testing import Case, Inputs, attend, attention_run, build, check_case

SUBSETS = [n for n in itertools.product((True, False), repeat=4) if any(n)]
CASE = Case(dtype="float32", batch=2, content="duplicates", seed=25)


def leaves(inputs: Inputs) -> list[Tensor]:
    found = [getattr(inputs, name) for name in GRADIENT_INPUTS]
    return [tensor for tensor in found if tensor is not None and tensor.requires_grad]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("needs", SUBSETS)
def test_each_subset_of_gradients_is_right_and_others_none(backend: str, needs, dtype: str):
    case = Case(dtype=dtype, needs_grad=needs, seed=25)
    result = check_case(case, attention_run(backend))
    assert result.status == "pass", result.message


@pytest.mark.parametrize("needs", SUBSETS)
def test_a_subset_equals_the_full_run(backend: str, needs):
    full = build(CASE)
    output, _ = attend(full, backend=backend)
    wanted = torch.autograd.grad(output.sum(), leaves(full))
    part = build(Case(**{**vars(CASE), "needs_grad": needs}))
    output, _ = attend(part, backend=backend)
    output.sum().backward()
    for name, gradient, wants in zip(GRADIENT_INPUTS, wanted, needs, strict=True):
        found = getattr(part, name).grad
        if wants:
            assert found.dtype == getattr(part, name).dtype
            torch.testing.assert_close(found, gradient)
        else:
            assert found is None


UPSTREAMS = {
    "expanded": lambda grad: grad[:, :, :1, :1].expand(grad.shape),
    "transposed": lambda grad: grad.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "strided": lambda grad: torch.stack([grad, grad], -1).flatten(-2)[..., ::2],
    "zero strides": lambda grad: grad.new_ones(()).expand(grad.shape),
}


@pytest.mark.parametrize("kind", UPSTREAMS)
def test_upstream_gradient_of_any_strides_equals_its_contiguous_copy(backend: str, kind: str):
    inputs = build(CASE)
    upstream = UPSTREAMS[kind](inputs.grad_output)
    found = []
    for gradient in (upstream, upstream.contiguous()):
        output, _ = attend(inputs, backend=backend)
        found.append(torch.autograd.grad(output, leaves(inputs), gradient))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_no_grad_gives_the_same_output_without_a_graph(backend: str):
    inputs = build(CASE)
    with torch.no_grad():
        output, lse = attend(inputs, backend=backend)
    assert not output.requires_grad
    live, live_lse = attend(inputs, backend=backend)
    assert torch.equal(output, live)
    assert torch.equal(lse, live_lse)


@pytest.mark.parametrize("name", [*GRADIENT_INPUTS, "kv_indices"])
def test_editing_an_input_between_forward_and_backward_raises(backend: str, name: str):
    inputs = build(CASE)
    output, _ = attend(inputs, backend=backend)
    with torch.no_grad():
        getattr(inputs, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_lse_is_not_differentiable(backend: str):
    inputs = build(CASE)
    output, lse = attend(inputs, backend=backend)
    assert output.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("name", GRADIENT_INPUTS)
def test_second_derivatives_raise_rather_than_vanish(backend: str, name: str):
    inputs = build(CASE)
    output, _ = attend(inputs, backend=backend)
    (first,) = torch.autograd.grad(output.square().sum(), getattr(inputs, name), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable"):
        torch.autograd.grad(first.square().sum(), inputs.query)


@pytest.mark.parametrize("switched", ["before", "between"])
def test_deterministic_backward_repeats_bit_for_bit_or_raises(backend: str, switched: str):
    """Ten backward runs; the switch is thrown before the forward or after it."""
    case = Case(batch=3, heads=16, tokens=33, pool=40, slots=20, content="duplicates", seed=27)
    inputs = build(case)
    torch.use_deterministic_algorithms(switched == "before")
    runs, refusal = [], ""
    try:
        output, _ = attend(inputs, backend=backend)
        torch.use_deterministic_algorithms(True)
        for _ in range(10):
            found = torch.autograd.grad(
                output, leaves(inputs), inputs.grad_output, retain_graph=True
            )
            runs.append(found)
    except BackendRefused as error:
        refusal = str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(runs) == 10 or (backend != "eager" and "deterministic" in refusal), refusal
    for run in runs[1:]:
        for one, other in zip(run, runs[0], strict=True):
            assert torch.equal(one, other)


def test_warn_only_never_raises(backend: str):
    inputs = build(CASE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output, _ = attend(inputs, backend=backend)
            gradients = torch.autograd.grad(output, leaves(inputs), inputs.grad_output)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_output_alone_is_the_same_as_with_lse(backend: str):
    inputs = build(Case(needs_grad=(False,) * 4))
    output, _ = attend(inputs, backend=backend)
    alone = attention(
        inputs.query,
        inputs.local_kv,
        inputs.sparse_kv,
        inputs.kv_indices,
        inputs.attention_sink,
        sliding_window_size=inputs.sliding_window_size,
        backend=backend,
    )
    assert torch.equal(output, alone)
