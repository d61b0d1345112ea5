"""The autograd surface: what is differentiable, once, and what tracing sees."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import csa_dispatch
from csa_dispatch import (
    BackendRefused,
    Call,
    Capabilities,
    attention,
    record_receipts,
    use_backend,
)
from csa_dispatch.call_spec import GRADIENT_INPUTS
from tests.core.probes import Inputs, WindowBackend, inputs

BACKENDS = ["eager", "attention_gym"]


def gradients(made: Inputs, **call: Any) -> list[torch.Tensor | None]:
    output = attention(*made, sliding_window_size=3, **call)
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    (output * weights).sum().backward()
    return [tensor.grad for tensor in made if tensor.is_floating_point()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs", [n for n in product((False, True), repeat=4) if any(n)])
def test_every_subset_of_gradients_equals_the_full_run(
    backend: str, needs: tuple[bool, ...]
) -> None:
    full = gradients(inputs(grad=True), backend=backend)
    made = inputs()
    differentiable = [made.query, made.local_kv, made.sparse_kv, made.attention_sink]
    for tensor, need in zip(differentiable, needs, strict=True):
        tensor.requires_grad_(need)
    for got, expected, need in zip(gradients(made, backend=backend), full, needs, strict=True):
        if need:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        else:
            assert got is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_raises(backend: str, power: int) -> None:
    made = inputs(grad=True)
    output = attention(*made, sliding_window_size=3, backend=backend)
    loss = output.square().sum() if power == 2 else output.sum()
    (grad,) = torch.autograd.grad(loss, made.query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        (loss + grad.square().sum()).backward()


@pytest.mark.parametrize("first", GRADIENT_INPUTS)
@pytest.mark.parametrize("second", GRADIENT_INPUTS)
def test_second_derivatives_by_any_input_raise(first: str, second: str) -> None:
    made = inputs(grad=True)
    output = attention(*made, sliding_window_size=3)
    (grad,) = torch.autograd.grad(output.sum(), getattr(made, first), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), getattr(made, second))


@pytest.mark.parametrize("backend", BACKENDS)
def test_differentiating_by_the_upstream_gradient_raises(backend: str) -> None:
    made = inputs(grad=True)

    def run(query: torch.Tensor) -> torch.Tensor:
        return attention(query, *made[1:], sliding_window_size=3, backend=backend)

    query = made.query.detach()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.functional.jvp(run, query, torch.ones_like(query))


def test_lse_is_not_differentiable_and_does_not_disturb_the_rest() -> None:
    made = inputs(grad=True)
    output, lse = attention(*made, sliding_window_size=3, return_lse=True)
    assert not lse.requires_grad
    (output.sum() + lse.sum()).backward()
    other = inputs(grad=True)
    attention(*other, sliding_window_size=3).sum().backward()
    assert torch.equal(made.query.grad, other.query.grad)


@pytest.mark.parametrize("name", ["query", "kv_indices"])
def test_in_place_edit_between_forward_and_backward_raises(name: str) -> None:
    made = inputs(grad=True)
    query = made.query * 1
    edited = query if name == "query" else made.kv_indices
    output = attention(query, *made[1:], sliding_window_size=3)
    with torch.no_grad():
        edited.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_no_grad_saves_nothing() -> None:
    made = inputs(grad=True)
    with torch.no_grad():
        assert not attention(*made, sliding_window_size=3).requires_grad
    with torch.inference_mode():
        attention(*made, sliding_window_size=3)


def test_determinism_switched_on_before_backward_is_honoured_or_raises(registered: Any) -> None:
    registered(WindowBackend("racy", Capabilities(deterministic=csa_dispatch.FALSE)))
    made = inputs(grad=True)
    outputs = {
        name: attention(made.query, made.local_kv, sliding_window_size=3, backend=name)
        for name in ("racy", "eager")
    }
    torch.use_deterministic_algorithms(True)
    try:
        outputs["eager"].sum().backward()
        with pytest.raises(BackendRefused, match="deterministic is True; needs False"):
            outputs["racy"].sum().backward()
        with pytest.raises(BackendRefused, match="deterministic"):
            attention(made.query, made.local_kv, backend="racy")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_path_equals_the_direct_path(backend: str) -> None:
    direct, traced = inputs(grad=True), inputs(grad=True)
    expected = attention(*direct, sliding_window_size=3, backend=backend)
    expected.sum().backward()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors, sliding_window_size=3, backend=backend)

    with record_receipts() as receipts:
        output = step(*traced)
        output.sum().backward()
    assert [(item.direction, item.backend) for item in receipts] == [
        ("forward", backend),
        ("backward", backend),
    ]
    torch.testing.assert_close(output, expected)
    for got, wanted in zip(traced, direct, strict=True):
        if got.is_floating_point():
            torch.testing.assert_close(got.grad, wanted.grad)


def test_forcing_at_trace_time_is_kept_in_the_graph() -> None:
    made = inputs()

    def step(query: torch.Tensor, local_kv: torch.Tensor) -> torch.Tensor:
        return attention(query, local_kv, sliding_window_size=3)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with record_receipts() as receipts:
        with use_backend("attention_gym"):
            compiled(made.query, made.local_kv)
        compiled(made.query, made.local_kv)
    assert receipts[0].backend == "attention_gym"


def test_meta_and_fake_tensors_give_shapes_without_running() -> None:
    made = inputs()
    with record_receipts() as receipts:
        output, lse = attention(
            *(tensor.to("meta") for tensor in made), sliding_window_size=3, return_lse=True
        )
    assert output.is_meta
    assert (output.shape, lse.shape) == (made.query.shape, (1, 4, 8))
    assert lse.dtype == torch.float32
    assert receipts == []


class RawMemory(WindowBackend):
    """Refuses what a kernel that reads memory by address would get wrong."""

    def forward(self, call: Call):
        assert not any(t.is_neg() for t in call if isinstance(t, torch.Tensor))
        return super().forward(call)

    def backward(self, call, output, lse, grad_output, needs):
        assert not any(t.is_neg() for t in (*call, grad_output) if isinstance(t, torch.Tensor))
        return super().backward(call, output, lse, grad_output, needs)


@pytest.mark.parametrize("lazy", ["query", "local_kv", "attention_sink", "grad_output"])
def test_backends_never_see_a_lazy_negation(registered: Any, lazy: str) -> None:
    registered(RawMemory("raw"))
    shapes = {"query": (1, 2, 5, 8), "local_kv": (1, 1, 5, 8), "attention_sink": (2,)}
    shapes["grad_output"] = shapes["query"]
    found = []
    for resolved in (False, True):
        torch.manual_seed(0)
        made = {n: torch.randn(*s, dtype=torch.complex64) for n, s in shapes.items()}
        plain = {n: z.imag.clone() for n, z in made.items()}
        plain[lazy] = made[lazy].conj().imag
        assert plain[lazy].is_neg()
        if resolved:
            plain[lazy] = plain[lazy].resolve_neg()
        grad_output = plain.pop("grad_output")
        leaves = {n: t.detach().requires_grad_() for n, t in plain.items()}
        output = attention(**leaves, sliding_window_size=3, backend="raw")
        found.append((output, *torch.autograd.grad(output, list(leaves.values()), grad_output)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
