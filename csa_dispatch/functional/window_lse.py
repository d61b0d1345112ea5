"""``attention_with_window_lse``: attention in two parts, every logit worked out once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa_dispatch.api import attention
from csa_dispatch.autograd import Needs, differentiable_once, needs_of
from csa_dispatch.auxiliary import traced_choice, traced_runner
from csa_dispatch.call import Call
from csa_dispatch.call_spec import spec_of
from csa_dispatch.layouts import LAYOUTS
from csa_dispatch.prepared import Arguments, autocast_arguments, checked_call
from csa_dispatch.reasons import BackendRefused, Reason
from csa_dispatch.runner import Runner
from csa_dispatch.transforms import any_autocast, refuse_transforms
from csa_dispatch.validation import fail, is_dtensor


class AttentionWithWindowLse(NamedTuple):
    """What ``attention_with_window_lse`` returns, in the caller's layout.

    Attributes:
        output, lse: as ``attention(..., return_lse=True)``.
        window_lse: ``log(sum_j exp(z_j) + exp(sink))`` over the window's keys alone, in lse's
            shape and dtype; not differentiable.
    """

    output: Tensor
    lse: Tensor
    window_lse: Tensor


def attention_with_window_lse(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor,
    kv_indices: Tensor | None = None,
    attention_sink: Tensor | None = None,
    *,
    sliding_window_size: int = 512,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    doc_ids: Tensor | None = None,
    compress_ratio: int | None = None,
    layout: str = "BHSD",
    backend: str | None = None,
    backward_backend: str | None = None,
) -> AttentionWithWindowLse:
    """``attention()``, with the lse of window and sink alone beside it.

    Megatron's indexer loss weighs heads by attention over *all* entries while attention itself
    sees some: it needs ``window_lse``, to which the loss adds the logits of the entries it looks
    at. It cannot be had from lse and the selected logits: ``log(exp(lse) - exp(selected))``
    cancels exactly where the selected entries draw nearly all attention. And a window-only
    ``attention()`` call beside the whole one would work the window's logits out twice.

    So this runs two calls, window with sink and entries without it, and merges them::

        lse    = logaddexp(window_lse, entries_lse)
        output = exp(window_lse - lse) * window_output + exp(entries_lse - lse) * entries_output

    Gradients are the whole call's: each part's backward is given the merged output and lse, which
    is all that a backward knows of the other keys. Outputs of the parts are rounded to the query's
    dtype before they are merged. The two calls cost more than one fused call by a pass over the
    output, forward and backward: use ``attention()`` where window_lse is not needed. Without
    entries at all, the lse of ``attention()`` is the window's.

    Args:
        sparse_kv: as for ``attention()``; required. The other arguments are ``attention()``'s.

    Raises:
        TypeError, ValueError: as ``attention()``.
        BackendRefused: as ``attention()``; or gradients are needed and a part's backward would
            be one that does not take the probabilities from the lse that it is given.
    """
    if sparse_kv is None:
        fail("sparse_kv", "None", "given", "Without it, attention()'s lse is the window's.")
    if isinstance(query, Tensor) and is_dtensor(query):
        remedy = "Pass query.to_local(), and this rank's part of the others."
        fail("query", "a DTensor", "this rank's tensor", remedy, TypeError)
    # A tensor's comparison may fail; what is no int, attention()'s own checks refuse below.
    if isinstance(sliding_window_size, (int, torch.SymInt)) and sliding_window_size == 0:
        # The window's part would see no key in any row, and no backward gives such rows' sink
        # a gradient.
        output, lse = attention(
            query,
            local_kv,
            sparse_kv,
            kv_indices,
            attention_sink,
            sliding_window_size=sliding_window_size,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            scale=scale,
            doc_ids=doc_ids,
            compress_ratio=compress_ratio,
            layout=layout,
            return_lse=True,
            backend=backend,
            backward_backend=backward_backend,
        )
        window_lse = torch.full_like(lse, -math.inf)
        if attention_sink is not None:
            window_lse = attention_sink.detach().to(lse.dtype)[:, None].expand_as(lse).clone()
        return AttentionWithWindowLse(output, lse, window_lse)
    arguments = Arguments(
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
        layout,
    )
    refuse_transforms("attention_with_window_lse")
    if any_autocast():
        arguments = autocast_arguments(arguments)
    call = checked_call(arguments)
    choice = traced_choice("attention", backend, backward_backend)
    output, lse, window_lse = torch.ops.csa_dispatch.attention_with_window_lse(
        *call, list(needs_of(call)), *choice
    )
    order = LAYOUTS[layout]
    return AttentionWithWindowLse(
        order.from_output(output), order.from_lse(lse), order.from_lse(window_lse)
    )


_CALL = (
    "Tensor query, Tensor local_kv, Tensor? sparse_kv, Tensor? kv_indices, "
    "Tensor? attention_sink, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? doc_ids, "
    "SymInt sliding_window_size, SymInt? compress_ratio, float scale"
)
_ROUTING = "bool[] needs_grad, str backend, str backward_backend"
_CALL_SIZE = len(Call._fields)
_TENSORS = 8
"""Fields of a Call that are tensors; they come first."""


class _Part(NamedTuple):
    """One of the two calls, the inputs it differentiates, and what runs it."""

    call: Call
    needs: Needs
    runner: Runner


def _parts(
    call: Call, needs: list[bool], backend: str, backward_backend: str
) -> tuple[_Part, _Part]:
    """Window with sink, and entries without it."""
    query, local, pool, sink = needs
    window = call._replace(sparse_kv=None, kv_indices=None, cu_seqlens_k=None, compress_ratio=None)
    entries = call._replace(attention_sink=None, sliding_window_size=0)

    def part(call: Call, needs: Needs) -> _Part:
        spec = spec_of(call, needs, tracing=True)
        runner = traced_runner(spec, backend, backward_backend)
        _require_lse(runner)
        return _Part(call, needs, runner)

    return (
        part(window, (query, local, False, sink)),
        part(entries, (query, False, pool, False)),
    )


def _require_lse(runner: Runner) -> None:
    name = runner.decision.backward
    if name is not None and not runner.backward_uses_lse:
        needed = "a backward that takes probabilities from the lse it is given"
        reason = Reason("backward", "worked out anew", needed, "Name another backward_backend.")
        raise BackendRefused(
            "attention_with_window_lse: a part of the keys cannot be differentiated alone.",
            {name: (reason,)},
        )


@torch.library.custom_op(
    "csa_dispatch::attention_with_window_lse",
    mutates_args=(),
    schema=f"({_CALL}, {_ROUTING}) -> (Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*arguments[:_CALL_SIZE])
    window, entries = _parts(call, *arguments[_CALL_SIZE:])
    output, window_lse = window.runner.forward(window.call)
    other, other_lse = entries.runner.forward(entries.call)
    lse = torch.logaddexp(window_lse, other_lse)
    merged = _weight(window_lse, lse) * output + _weight(other_lse, lse) * other
    result = torch.empty_like(call.query).copy_(merged)
    return result, lse, window_lse.contiguous()


def _weight(part: Tensor, lse: Tensor) -> Tensor:
    """``exp(part - lse)``; 0 where a sink takes all or the token sees nothing."""
    return torch.where(lse.isfinite(), (part - lse).exp(), 0)[..., None]


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query: Tensor = arguments[0]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty(query.shape[:3], dtype=dtype)
    return torch.empty_like(query), lse, torch.empty_like(lse)


@torch.library.custom_op(
    "csa_dispatch::attention_with_window_lse_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad_output, Tensor output, Tensor lse, {_CALL}, {_ROUTING}) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _gradients(
    grad_output: Tensor, output: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, local_kv, sparse_kv and sink; an empty tensor for each not needed."""
    call = Call(*arguments[:_CALL_SIZE])
    window, entries = _parts(call, *arguments[_CALL_SIZE:])
    saved = output, lse, grad_output
    first = _part_gradients(window, *saved)
    second = _part_gradients(entries, *saved)
    query = None
    if first[0] is not None and second[0] is not None:
        query = first[0] + second[0]
    return tuple(
        call.query.new_empty(0) if item is None else item.contiguous()
        for item in (query, first[1], second[2], first[3])
    )


def _part_gradients(part: _Part, *saved: Tensor) -> tuple[Tensor | None, ...]:
    if not any(part.needs):
        return (None,) * 4
    return part.runner.backward(part.call, *saved, part.needs)


@_gradients.register_fake
def _(grad_output: Tensor, output: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    del grad_output, output, lse
    call, needs = Call(*arguments[:_CALL_SIZE]), arguments[_CALL_SIZE]
    inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
    return tuple(
        tensor.new_empty(tensor.shape)
        if needed and tensor is not None
        else call.query.new_empty(0)
        for tensor, needed in zip(inputs, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[:2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.rest = inputs[_TENSORS:]


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    *tensors, output, lse = ctx.saved_tensors
    found = torch.ops.csa_dispatch.attention_with_window_lse_backward(
        grad_output, output, lse, *tensors, *ctx.rest
    )
    needs = ctx.rest[_CALL_SIZE - _TENSORS]
    query, local_kv, sparse_kv, sink = (
        gradient if needed else None for gradient, needed in zip(found, needs, strict=True)
    )
    return (query, local_kv, sparse_kv, None, sink, *(None,) * 9)


_forward.register_autograd(_backward, setup_context=_setup_context)
differentiable_once("attention_with_window_lse", _gradients)
