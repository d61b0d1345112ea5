"""Autograd glue of ``compress_kv``: for plain tensors, and as operators for all that traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from csa_dispatch.autograd import Once, differentiable_once
from csa_dispatch.auxiliary import traced_runner
from csa_dispatch.compressor_call import CompressorCall, CompressorNeeds, compressor_spec_of
from csa_dispatch.runner import Runner
from csa_dispatch.transforms import is_mapped

_CALL = (
    "Tensor values, Tensor gates, Tensor position_bias, SymInt compress_ratio, bool overlapping, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k"
)
_ROUTING = "bool[] needs_grad, str backend, str backward_backend"
_CALL_SIZE = len(CompressorCall._fields)


class CompressFunction(torch.autograd.Function):
    """The pooling as one differentiable step; keeps only the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        gates: Tensor,
        position_bias: Tensor,
        call: CompressorCall,
        runner: Runner,
    ) -> Tensor:
        # The three differentiable tensors are passed beside the call for autograd to see them.
        ctx.save_for_backward(values, gates, position_bias, call.cu_seqlens, call.cu_seqlens_k)
        ctx.scalars = call.compress_ratio, call.overlapping
        ctx.runner = runner
        return runner.forward(call)

    @staticmethod
    def backward(ctx: Any, grad_entries: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        call = _saved_call(ctx)
        needs: CompressorNeeds = ctx.needs_input_grad[:3]
        if is_mapped(grad_entries):  # torch runs an operator once for each mapped gradient
            names = ctx.runner.decision.forward or "", ctx.runner.decision.backward or ""
            return (*_run_backward(grad_entries, call, needs, *names), None, None)
        with torch.no_grad():
            gradients = ctx.runner.backward(call, grad_entries.resolve_neg(), needs)
        if torch.is_grad_enabled():  # create_graph=True
            sources = (*call[:3], grad_entries)
            gradients = Once.apply("compress_kv", len(sources), *sources, *gradients)
        return (*gradients, None, None)


def _saved_call(ctx: Any) -> CompressorCall:
    values, gates, position_bias, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    ratio, overlapping = ctx.scalars
    return CompressorCall(
        values, gates, position_bias, ratio, overlapping, cu_seqlens, cu_seqlens_k
    )


def _runner(
    call: CompressorCall, needs_grad: list[bool], backend: str, backward_backend: str
) -> Runner:
    values, gates, bias = needs_grad
    spec = compressor_spec_of(call, (values, gates, bias), tracing=True)
    return traced_runner(spec, backend, backward_backend)


@torch.library.custom_op(
    "csa_dispatch::compress_kv", mutates_args=(), schema=f"({_CALL}, {_ROUTING}) -> Tensor"
)
def compress_kv_op(*arguments: Any) -> Tensor:
    """Entries ``[B, T // r, D]``."""
    call = CompressorCall(*arguments[:_CALL_SIZE])
    return _runner(call, *arguments[_CALL_SIZE:]).forward(call)


@compress_kv_op.register_fake
def _(*arguments: Any) -> Tensor:
    call = CompressorCall(*arguments[:_CALL_SIZE])
    return call.values.new_empty(call.values.shape[0], call.entries, call.head_dim)


@torch.library.custom_op(
    "csa_dispatch::compress_kv_backward",
    mutates_args=(),
    schema=f"(Tensor grad_entries, {_CALL}, {_ROUTING}) -> (Tensor, Tensor, Tensor)",
)
def compress_kv_backward_op(grad_entries: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of values, gates and position_bias; an empty tensor for each not needed."""
    call = CompressorCall(*arguments[:_CALL_SIZE])
    routing = arguments[_CALL_SIZE:]
    found = _runner(call, *routing).backward(call, grad_entries, tuple(routing[0]))
    return tuple(
        grad_entries.new_empty(0) if item is None else item.contiguous() for item in found
    )


@compress_kv_backward_op.register_fake
def _(grad_entries: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    needs = arguments[_CALL_SIZE]
    return tuple(
        tensor.new_empty(tensor.shape if needed else (0,))
        for tensor, needed in zip(arguments[:3], needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:3], *inputs[5:_CALL_SIZE])
    ctx.scalars = inputs[3:5]
    needs, *names = inputs[_CALL_SIZE:]
    # Inside torch.vmap whoever called the operator could not see which gradients are needed.
    found = zip(needs, ctx.needs_input_grad[:3], strict=True)
    ctx.routing = ([a or b for a, b in found], *names)


def _run_backward(
    grad_entries: Tensor, call: CompressorCall, needs: Sequence[bool], *names: str
) -> tuple[Tensor | None, ...]:
    """Gradients of values, gates and position_bias by the operator; None where not needed."""
    found = torch.ops.csa_dispatch.compress_kv_backward(grad_entries, *call, list(needs), *names)
    return tuple(item if needed else None for item, needed in zip(found, needs, strict=True))


def _backward(ctx: Any, grad_entries: Tensor) -> tuple[Tensor | None, ...]:
    return (*_run_backward(grad_entries, _saved_call(ctx), *ctx.routing), *(None,) * 7)


compress_kv_op.register_autograd(_backward, setup_context=_setup_context)
differentiable_once("compress_kv", compress_kv_backward_op)
