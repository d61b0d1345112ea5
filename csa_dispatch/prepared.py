"""Prepared calls: the checks and choices that depend on metadata alone, made once and cached.

``signature`` is everything validation and routing look at. A signature seen before needs one
dictionary look-up: that is the whole cost of the dispatcher in a warm loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import AttentionFunction, needs_of
from .call import Call
from .layouts import LAYOUTS, Layout
from .operators import attention_op
from .policy import Policy
from .runner import Runner
from .transforms import refuse_transforms, transforms_active
from .validation import validate

_CAST = (torch.float32, torch.bfloat16, torch.float16)
BHSD = LAYOUTS["BHSD"]
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
dispatch_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportAttributeAccessIssue]


class Arguments(NamedTuple):
    """``attention()``'s arguments that say what to compute, as the caller gave them."""

    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor | None
    kv_indices: Tensor | None
    attention_sink: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    doc_ids: Tensor | None
    sliding_window_size: int
    compress_ratio: int | None
    scale: float | None
    layout: str


class Prepared(NamedTuple):
    """A validated signature bound to the Runner that serves it."""

    order: Layout
    scale: float
    differentiable: bool
    runner: Runner
    policy: Policy | None


def autocast_arguments(arguments: Arguments) -> Arguments:
    """The arguments as autocast wants them: query and KV in its dtype.

    float64 stays, as everywhere under autocast, and so do dtypes that validation refuses and the
    sink: it is an fp32 parameter by design. Gradients come back in the inputs' own dtypes.
    """
    query, local_kv, sparse_kv = arguments[:3]
    tensors = [tensor for tensor in (query, local_kv, sparse_kv) if tensor is not None]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return arguments  # validation says so
    device_type = query.device.type
    if query.dtype not in _CAST or not torch.is_autocast_enabled(device_type):
        return arguments
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in _CAST else tensor

    return arguments._replace(
        query=cast(query),
        local_kv=cast(local_kv),
        sparse_kv=None if sparse_kv is None else cast(sparse_kv),
    )


def undisturbed() -> bool:
    """Whether the call is in eager mode, with no dispatch mode and no transform around it."""
    return not (torch.compiler.is_compiling() or dispatch_modes() or transforms_active())


def is_plain(arguments: Arguments) -> bool:
    """Whether the call may skip the operators: it is undisturbed, and its tensors are plain."""
    return undisturbed() and tensors_plain(arguments)


def tensors_plain(arguments: Arguments) -> bool:
    """Whether all tensors are ordinary ones, whose memory a kernel may read.

    Tensors whose negation is lazy, as of ``z.conj().imag``, are not plain: a kernel that reads
    their memory would miss the sign. The operators get them resolved.
    """
    query, local_kv, sparse_kv, _, sink = arguments[:5]
    if query is None or local_kv is None:
        return False  # validation says so
    for value in arguments[:8]:
        if type(value) not in PLAIN_TYPES:
            return False
        if value is not None and value.layout is not torch.strided:
            return False
    if query.is_neg() or local_kv.is_neg():
        return False
    if (sparse_kv is not None and sparse_kv.is_neg()) or (sink is not None and sink.is_neg()):
        return False
    return not query.is_meta


def situation(arguments: Arguments) -> tuple[object, ...]:
    """What checks and routing depend on beside tensors' properties and the scalars."""
    query, local_kv, sparse_kv = arguments[:3]
    address = query.data_ptr() | local_kv.data_ptr()
    if sparse_kv is not None:
        address |= sparse_kv.data_ptr()
    return (
        address & 15,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def signature(arguments: Arguments) -> tuple[object, ...]:
    """A hashable key of all the metadata a plain call's checks and routing depend on.

    Python's ``True == 1 == 1.0`` must not let a bad argument ride on a good one's entry, hence
    the types beside the scalars. With a bad argument the key may fail to hash; validation then
    says what is wrong.
    """
    window, ratio, scale, layout = arguments[8:]
    return (
        *[
            None
            if tensor is None
            else (
                tensor.shape,
                # Where contiguous, the strides of what has more than one element follow.
                True if tensor.is_contiguous() else tensor.stride(),
                tensor.dtype,
                tensor.device,
                tensor.requires_grad,
            )
            for tensor in arguments[:8]
        ],
        window,
        type(window),
        ratio,
        type(ratio),
        scale,
        type(scale),
        layout,
        *situation(arguments),
    )


def checked_call(arguments: Arguments) -> Call:
    """Validate and view the arguments in canonical order.

    Raises:
        TypeError, ValueError: see ``csa_dispatch.validation.validate``.
    """
    validate(
        arguments.query,
        arguments.local_kv,
        arguments.sparse_kv,
        arguments.kv_indices,
        arguments.attention_sink,
        arguments.sliding_window_size,
        arguments.cu_seqlens,
        arguments.cu_seqlens_k,
        arguments.scale,
        arguments.doc_ids,
        arguments.compress_ratio,
        arguments.layout,
    )
    scale = arguments.scale
    if scale is None:
        scale = arguments.query.shape[-1] ** -0.5
    return canonical(arguments, LAYOUTS[arguments.layout], float(scale))


def canonical(arguments: Arguments, order: Layout, scale: float) -> Call:
    """The validated arguments as a Call: views in BHSD order."""
    (
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        attention_sink,
        cu_seqlens,
        cu_seqlens_k,
        doc_ids,
        window,
        ratio,
        _,
        layout,
    ) = arguments
    if layout != "BHSD":
        query = order.to_query(query)
        local_kv = order.to_kv(local_kv)
        sparse_kv = None if sparse_kv is None else order.to_kv(sparse_kv)
        kv_indices = None if kv_indices is None else order.to_tokens(kv_indices)
        doc_ids = None if doc_ids is None else order.to_tokens(doc_ids)
    return Call(
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        attention_sink,
        cu_seqlens,
        cu_seqlens_k,
        doc_ids,
        window,
        ratio,
        scale,
    )


def run(prepared: Prepared, call: Call) -> tuple[Tensor, Tensor]:
    """Run a plain call; the results are in the caller's layout."""
    if prepared.differentiable:
        output, lse = AttentionFunction.apply(  # pyright: ignore[reportGeneralTypeIssues]
            call.query, call.local_kv, call.sparse_kv, call.attention_sink, call, prepared.runner
        )
    else:
        output, lse = prepared.runner.forward(call)
    if prepared.order is BHSD:
        return output, lse
    return prepared.order.from_output(output), prepared.order.from_lse(lse)


def _register_sharding_rules() -> None:
    from .distributed import register_sharding_rules

    register_sharding_rules()


# What torch.compiler.assume_constant_result sets; calling that would import all of dynamo.
_register_sharding_rules._dynamo_marked_constant = True  # pyright: ignore


def run_operator(
    arguments: Arguments, call: Call, forward: str, backward: str, check_values: bool
) -> tuple[Tensor, Tensor]:
    """Run a call through the opaque operators, which route (and check values) when they run.

    Raises:
        NotImplementedError: inside a torch.func transform that cannot apply.
    """
    refuse_transforms()
    if type(arguments.query).__name__ == "DTensor":
        _register_sharding_rules()
    output, lse = attention_op(*call, list(needs_of(call)), forward, backward, check_values)
    order = LAYOUTS[arguments.layout]
    return order.from_output(output), order.from_lse(lse)
