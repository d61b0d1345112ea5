"""The opaque operators that tracing, fake tensors, DTensor and dispatch modes see.

``csa_dispatch::attention`` and ``csa_dispatch::attention_backward`` take canonical tensors and
route when they run: a graph holds what was forced when it was traced ("" for nothing), and
follows the policy in force at run time for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import Needs, differentiable_once
from .call import Call, Gradients
from .call_spec import spec_of
from .forcing import Forced, check_reached
from .policy import current_policy
from .runner import Runner, runner_for
from .settings import settings
from .transforms import refuse_transforms
from .value_checks import check_values as check_values_of

CALL_SCHEMA = (
    "Tensor query, Tensor local_kv, Tensor? sparse_kv, Tensor? kv_indices, "
    "Tensor? attention_sink, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? doc_ids, "
    "SymInt sliding_window_size, SymInt? compress_ratio, float scale"
)
_ROUTING = "bool[] needs_grad, str backend, str backward_backend"
CALL_SIZE = len(Call._fields)


def chosen_runner(
    call: Call, needs_grad: list[bool], backend: str, backward_backend: str
) -> Runner:
    """What the operators run the call with, if they run now.

    Raises:
        BackendRefused: see ``csa_dispatch.routing.route``.
    """
    query, local_kv, sparse_kv, sink = needs_grad
    spec = spec_of(call, (query, local_kv, sparse_kv, sink), tracing=True)
    source = "argument, context or environment when traced"
    forced = Forced(backend or None, backward_backend or None, source)
    return runner_for(spec, forced, current_policy(settings().policy))


@torch.library.custom_op(
    "csa_dispatch::attention",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, {_ROUTING}, bool check_values) -> (Tensor, Tensor)",
)
def attention_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and lse."""
    call = Call(*arguments[:CALL_SIZE])
    if not call.query.numel():
        return _empty_output(call.query)
    refuse_transforms()  # around a graph that was traced without them
    *routing, check_values = arguments[CALL_SIZE:]
    if check_values:
        check_values_of(call)
    runner = chosen_runner(call, *routing)
    if not routing[1]:
        check_reached(runner.decision.forward)
    output, lse = runner.forward(call)
    return _in_memory_order(output, call.query), lse.contiguous()


def _in_memory_order(result: Tensor, like: Tensor) -> Tensor:
    """``result`` with the strides that ``empty_like`` promised to whoever traced the call."""
    promised = torch.empty_like(like, device="meta").stride()
    if result.stride() == promised:
        return result
    return torch.empty_strided(
        result.shape, promised, dtype=result.dtype, device=result.device
    ).copy_(result)


@attention_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_output(arguments[0])


def _empty_output(query: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse without values: all of them where DTensor leaves a rank no head or batch."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=dtype)


@torch.library.custom_op(
    "csa_dispatch::attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad_output, Tensor output, Tensor lse, {CALL_SCHEMA}, {_ROUTING}) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def attention_backward_op(
    grad_output: Tensor, output: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, local_kv, sparse_kv and sink; an empty tensor for each not needed."""
    call = Call(*arguments[:CALL_SIZE])
    query, local_kv, sparse_kv, sink = arguments[CALL_SIZE]
    needs: Needs = (query, local_kv, sparse_kv, sink)
    inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
    if call.query.numel():
        runner = chosen_runner(call, *arguments[CALL_SIZE:])
        gradients = runner.backward(call, output, lse, grad_output, needs)
    else:
        gradients = Gradients(
            *(
                torch.zeros_like(tensor) if needed and tensor is not None else None
                for tensor, needed in zip(inputs, needs, strict=True)
            )
        )
    return tuple(
        call.query.new_empty(0) if item is None or like is None else _in_memory_order(item, like)
        for item, like in zip(gradients, inputs, strict=True)
    )


@attention_backward_op.register_fake
def _(grad_output: Tensor, output: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    del grad_output, output, lse
    call = Call(*arguments[:CALL_SIZE])
    inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
    return tuple(
        torch.empty_like(tensor) if needed and tensor is not None else call.query.new_empty(0)
        for tensor, needed in zip(inputs, arguments[CALL_SIZE], strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.mark_non_differentiable(output[1])
    *scalars, needs, backend, backward_backend = inputs[8:-1]
    query, local_kv, sparse_kv, _, sink, *_ = ctx.needs_input_grad
    # Inside torch.vmap whoever called the operator could not see which gradients are needed.
    found = zip(needs, (query, local_kv, sparse_kv, sink), strict=True)
    ctx.rest = (*scalars, [a or b for a, b in found], backend, backward_backend)


def run_attention_backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    call: Sequence[Any],
    needs: Sequence[bool],
    *names: str,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, local_kv, sparse_kv and sink by the operator; None where not needed.

    Args:
        call: the fields of a Call.
        needs: which of the four are needed.
        names: the backends forced for the forward and the backward, or "".
    """
    found = torch.ops.csa_dispatch.attention_backward(
        grad_output, output, lse, *call, list(needs), *names
    )
    return tuple(
        gradient if needed else None for gradient, needed in zip(found, needs, strict=True)
    )


def _backward(ctx: Any, grad_output: Tensor, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    *tensors, output, lse = ctx.saved_tensors
    *scalars, needs, backend, backward_backend = ctx.rest
    query, local_kv, sparse_kv, sink = run_attention_backward(
        grad_output, output, lse, (*tensors, *scalars), needs, backend, backward_backend
    )
    return (query, local_kv, sparse_kv, None, sink, *(None,) * 10)


attention_op.register_autograd(_backward, setup_context=_setup_context)
differentiable_once("attention", attention_backward_op)
