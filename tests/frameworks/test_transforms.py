"""vmap and several gradients at once are right; torch.func's derivatives are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from csa_dispatch import attention
from tests.core.probes import inputs


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_functorch_gradients_are_refused_clearly_and_vmap_is_right() -> None:
    made = inputs()

    def call(query: Tensor) -> Tensor:
        return attention(query, *made[1:], sliding_window_size=3)

    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda query: call(query).sum())(made.query)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.jvp"):
        torch.func.jvp(call, (made.query,), (made.query,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(made.query, made.query)
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            call(dual)
    stacked = torch.stack([made.query, made.query * 2])
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda queries: torch.vmap(call)(queries).sum())(stacked)
    mapped = torch.vmap(call)(stacked)
    torch.testing.assert_close(mapped[1], call(made.query * 2))


def tangent(call: Callable[[Tensor], Tensor], query: Tensor) -> Tensor | None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        return torch.autograd.forward_ad.unpack_dual(call(dual)).tangent


@pytest.mark.parametrize(
    ("name", "transformed"),
    [
        ("grad", lambda call: torch.func.grad(lambda query: call(query).sum())),
        ("vjp", lambda call: lambda query: torch.func.vjp(call, query)[1](query)),
        ("jvp", lambda call: lambda query: torch.func.jvp(call, (query,), (query,))[1]),
        ("jacfwd", torch.func.jacfwd),
        ("forward-mode AD", lambda call: partial(tangent, call)),
    ],
)
def test_transforms_inside_traced_code_are_refused_as_outside(name: str, transformed: Any):
    """torch itself would give forward derivatives of 0."""
    made = inputs()
    function = transformed(lambda query: attention(query, *made[1:], sliding_window_size=3))
    for options in ({"fullgraph": True}, {}):
        compiled = torch.compile(function, backend="aot_eager", **options)
        with pytest.raises((Unsupported, NotImplementedError), match=rf"is inside .*{name}"):
            compiled(made.query)


def test_a_graph_traced_before_forward_mode_began_refuses_it():
    made = inputs()
    call = torch.compile(
        lambda query: attention(query, *made[1:], sliding_window_size=3), backend="aot_eager"
    )
    call(made.query)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        tangent(call, made.query)


@pytest.mark.parametrize("compiled", [False, True])
def test_many_gradients_at_once_are_each_right(compiled: bool) -> None:
    made = inputs(grad=True)
    call: Any = partial(attention, sliding_window_size=3)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    output = call(*made)
    leaves = [made.query, made.local_kv, made.sparse_kv, made.attention_sink]
    upstream = torch.stack([output.detach(), output.detach() ** 2])

    def gradients(one: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, one, retain_graph=True, **options)

    right = tuple(map(torch.stack, zip(*map(gradients, upstream), strict=True)))
    found = {"is_grads_batched": gradients(upstream, is_grads_batched=True)}
    if not compiled:  # a compiled backward refuses torch.vmap
        found["vmap"] = torch.vmap(gradients)(upstream)
    for way, mapped in found.items():
        for one, other in zip(mapped, right, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, way=way: f"{way}: {text}")
    query = made.query.detach()
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(
        jacobian(lambda one: call(one, *made[1:])[0, 0, 5], query, vectorize=True),
        jacobian(lambda one: call(one, *made[1:])[0, 0, 5], query),
    )


def test_second_derivatives_of_many_gradients_raise():
    made = inputs(grad=True)
    output = attention(*made, sliding_window_size=3)
    (mapped,) = torch.autograd.grad(
        output,
        made.query,
        torch.stack([output.detach()] * 2),
        is_grads_batched=True,
        create_graph=True,
    )
    with pytest.raises(RuntimeError, match=r"attention\(\) is differentiable once"):
        mapped.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_vmap_has_gradients_of_what_it_maps(compiled: bool, fixed: bool) -> None:
    made = inputs(grad=fixed)
    stacked = torch.stack([made.query.detach(), made.query.detach() * 2]).requires_grad_()

    def call(query: Tensor) -> Tensor:
        return attention(query, *made[1:], sliding_window_size=3)

    mapped = torch.vmap(call)
    if compiled:
        mapped = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    leaves = [stacked, made.local_kv] if fixed else [stacked]
    found = torch.autograd.grad(mapped(stacked).sum(), leaves)
    right = torch.autograd.grad(sum(call(query).sum() for query in stacked), leaves)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
