"""Autograd glue, and the operators that tracing, fake tensors and dispatch modes see.

Plain tensors in eager mode take the autograd Function directly, the cheapest way. Everything
else (torch.compile, FakeTensor, DTensor, dispatch modes) goes through the opaque operators
``csa_dispatch::attention`` and ``csa_dispatch::attention_backward``, which route when they run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .call import Call
from .call_spec import spec_of
from .forcing import Forced
from .policy import current_policy
from .runner import Runner, runner_for
from .settings import settings
from .value_checks import check_values as check_values_of

Needs = tuple[bool, bool, bool, bool]


class _Once(torch.autograd.Function):
    """The gradients, tied to an input so that differentiating them raises.

    ``once_differentiable`` would not do: it ties them to grad_output alone, and with one that
    needs no gradient, as from ``output.sum()``, second derivatives would silently be 0.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, *gradients: Tensor | None):  # pyright: ignore
        del ctx, anchor
        return gradients

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Tensor | None):  # pyright: ignore
        raise RuntimeError(
            "attention() is differentiable once; its gradients were differentiated again "
            "(create_graph=True)."
        )


class AttentionFunction(torch.autograd.Function):
    """The operation as one differentiable step; lse is not differentiable."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        local_kv: Tensor,
        sparse_kv: Tensor | None,
        attention_sink: Tensor | None,
        call: Call,
        runner: Runner,
    ) -> tuple[Tensor, Tensor]:
        # The four differentiable tensors are passed beside the call for autograd to see them.
        output, lse = runner.forward(call)
        ctx.save_for_backward(*call[:8], output, lse)  # pyright: ignore[reportArgumentType]
        ctx.mark_non_differentiable(lse)
        ctx.scalars = call[8:]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.runner = runner  # pyright: ignore[reportAttributeAccessIssue]
        return output, lse

    @staticmethod
    def backward(ctx, grad_output: Tensor, _grad_lse: Tensor):  # pyright: ignore
        *tensors, output, lse = ctx.saved_tensors
        call = Call(*tensors, *ctx.scalars)
        needs: Needs = ctx.needs_input_grad[:4]
        with torch.no_grad():
            gradients = ctx.runner.backward(call, output, lse, grad_output, needs)
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
            anchor = next(tensor for tensor, needed in zip(inputs, needs, strict=True) if needed)
            gradients = _Once.apply(anchor, *gradients)
        return (*gradients, None, None)


def _runtime_runner(call: Call, needs: Sequence[bool], backend: str, backward: str) -> Runner:
    first, second, third, fourth = needs
    spec = spec_of(call, (first, second, third, fourth), tracing=True)
    source = "argument, context or environment when traced"
    forced = Forced(backend or None, backward or None, source)
    return runner_for(spec, forced, current_policy(settings().policy))


@torch.library.custom_op("csa_dispatch::attention", mutates_args=())
def attention_op(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None,
    kv_indices: Tensor | None,
    attention_sink: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    doc_ids: Tensor | None,
    sliding_window_size: int,
    compress_ratio: int | None,
    scale: float,
    needs_grad: list[bool],
    backend: str,
    backward_backend: str,
    check_values: bool,
) -> tuple[Tensor, Tensor]:
    """The forward on canonical tensors; routes when it runs. "" leaves a choice to routing."""
    call = Call(
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        attention_sink,
        cu_seqlens,
        cu_seqlens_k,
        doc_ids,
        sliding_window_size,
        compress_ratio,
        scale,
    )
    if check_values:
        check_values_of(call)
    return _runtime_runner(call, needs_grad, backend, backward_backend).forward(call)


@attention_op.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=dtype)


@torch.library.custom_op("csa_dispatch::attention_backward", mutates_args=())
def attention_backward_op(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None,
    kv_indices: Tensor | None,
    attention_sink: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    doc_ids: Tensor | None,
    sliding_window_size: int,
    compress_ratio: int | None,
    scale: float,
    needs_grad: list[bool],
    backend: str,
    backward_backend: str,
) -> list[Tensor]:
    """The gradients asked for, in the order query, local_kv, sparse_kv, attention_sink."""
    call = Call(
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        attention_sink,
        cu_seqlens,
        cu_seqlens_k,
        doc_ids,
        sliding_window_size,
        compress_ratio,
        scale,
    )
    first, second, third, fourth = needs_grad
    runner = _runtime_runner(call, needs_grad, backend, backward_backend)
    needs: Needs = (first, second, third, fourth)
    gradients = runner.backward(call, output, lse, grad_output, needs)
    return [gradient for gradient in gradients if gradient is not None]


def _inputs_needing(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    pairs = zip(inputs, needs, strict=True)
    return [tensor for tensor, needed in pairs if needed and tensor is not None]


@attention_backward_op.register_fake
def _(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None,
    kv_indices: Tensor | None,
    attention_sink: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    doc_ids: Tensor | None,
    sliding_window_size: int,
    compress_ratio: int | None,
    scale: float,
    needs_grad: list[bool],
    backend: str,
    backward_backend: str,
) -> list[Tensor]:
    inputs = (query, local_kv, sparse_kv, attention_sink)
    return [torch.empty_like(tensor) for tensor in _inputs_needing(inputs, needs_grad)]


def _setup_context(ctx, inputs, output) -> None:  # pyright: ignore
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.rest = inputs[8:14]


def _backward(ctx, grad_output: Tensor, _grad_lse: Tensor | None):  # pyright: ignore
    *tensors, output, lse = ctx.saved_tensors
    needs = ctx.rest[3]
    found = iter(
        torch.ops.csa_dispatch.attention_backward(grad_output, output, lse, *tensors, *ctx.rest)
    )
    query, local_kv, sparse_kv, sink = (next(found) if needed else None for needed in needs)
    return (query, local_kv, sparse_kv, None, sink, *(None,) * 10)


attention_op.register_autograd(_backward, setup_context=_setup_context)


def needs_of(call: Call) -> Needs:
    """Which of query, local_kv, sparse_kv, attention_sink need gradients now."""
    if not torch.is_grad_enabled():
        return (False, False, False, False)
    sparse_kv, sink = call.sparse_kv, call.attention_sink
    return (
        call.query.requires_grad,
        call.local_kv.requires_grad,
        sparse_kv is not None and sparse_kv.requires_grad,
        sink is not None and sink.requires_grad,
    )
