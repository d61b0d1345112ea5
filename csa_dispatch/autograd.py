"""Autograd glue for plain tensors in eager mode; ``operators`` has the rest."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]

from .call import Call
from .runner import Runner
from .transforms import is_mapped

Needs = tuple[bool, bool, bool, bool]


class Once(torch.autograd.Function):
    """The gradients, tied to all that they depend on so that differentiating them raises.

    ``once_differentiable`` would not do: it ties them to grad_output alone, and with one that
    needs no gradient, as from ``output.sum()``, second derivatives would silently be 0. So would
    those by any input, or by grad_output, that were left out here.
    """

    @staticmethod
    def forward(ctx, operation: str, sources: int, *tensors: Tensor | None):  # pyright: ignore
        """``tensors`` are ``sources`` that the gradients depend on, then the gradients."""
        ctx.operation = operation
        return tensors[sources:]

    @staticmethod
    def backward(ctx, *_: Tensor | None):  # pyright: ignore
        _refuse(ctx.operation)


def differentiable_once(operation: str, gradients: CustomOpDef) -> None:
    """Have differentiating the operator ``gradients`` raise in the name of ``operation``."""
    gradients.register_autograd(lambda _ctx, *_: _refuse(operation))


def _refuse(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation}() is differentiable once; its gradients were differentiated again "
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
        if is_mapped(grad_output):
            gradients = _each_backward(grad_output, output, lse, call, needs, ctx.runner)
            return (*gradients, None, None)
        grad_output = grad_output.resolve_neg()  # a kernel reads memory, not lazy signs
        with torch.no_grad():
            gradients = ctx.runner.backward(call, output, lse, grad_output, needs)
        if torch.is_grad_enabled():  # create_graph=True
            sources = (call.query, call.local_kv, call.sparse_kv, call.attention_sink, grad_output)
            gradients = Once.apply("attention", len(sources), *sources, *gradients)
        return (*gradients, None, None)


def _each_backward(grad_output: Tensor, output: Tensor, lse: Tensor, call: Call, needs: Needs,
                   runner: Runner):  # fmt: skip
    """The backward as an operator, which torch runs once for each of the mapped gradients."""
    from .operators import run_attention_backward

    forward, backward = runner.decision.forward or "", runner.decision.backward or ""
    return run_attention_backward(grad_output, output, lse, call, needs, forward, backward)


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
