"""``explain()``: the Decision for a call or a description of one, on this or any hardware."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .autograd import needs_of
from .auxiliary import describer
from .call_spec import CallSpec, is_device_type, spec_of
from .forcing import forced_for, traced_arguments
from .operations import SPECS, AnySpec, check_any_spec
from .policy import current_policy
from .prepared import Arguments, autocast_arguments, checked_call, is_plain
from .routing import Decision, decide
from .settings import settings
from .spec import Spec
from .tracing import constant_when_traced
from .transforms import any_autocast
from .validation import check_flag, fail


def parse_device(device: str) -> tuple[str, int | None]:
    """``("cuda", 103)`` for "sm_103" (a suffix letter is ignored), ``("cpu", None)`` for "cpu".

    Raises:
        TypeError: not a string.
        ValueError: neither ``sm_<number>`` nor a device type.
    """
    wanted = (
        "a CUDA architecture such as 'sm_90' or 'sm_103', or another device type such as 'cpu'"
    )
    if not isinstance(device, str):
        fail("device", repr(device), wanted, "Pass a name, as 'cpu'.", TypeError)
    match = re.fullmatch(r"sm_?([1-9]\d{1,2})[af]?", device)
    if match:
        return "cuda", int(match.group(1))
    if device == "cuda" or not is_device_type(device):
        remedy = "torch.cuda.get_device_capability() is (9, 0) for sm_90."
        fail("device", repr(device), wanted, remedy)
    return device, None


def describe_call(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None = None,
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
) -> CallSpec:
    """The CallSpec of ``attention()`` with these arguments, after the same validation.

    Tensors may be real, meta or fake.

    Raises:
        TypeError, ValueError: as ``attention()``.
    """
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
    if any_autocast():
        arguments = autocast_arguments(arguments)
    call = checked_call(arguments)
    return spec_of(call, needs_of(call), tracing=not is_plain(arguments))


def describe(
    name: str, query: Tensor, tensors: tuple[Tensor | None, ...], arguments: dict[str, object]
) -> CallSpec:
    """``describe_call`` on behalf of the function ``name``, which errors are to name."""
    if not isinstance(query, Tensor):
        remedy = f"Pass {name}() the arguments of attention()."
        fail("query", type(query).__name__, "a torch.Tensor or a CallSpec", remedy, TypeError)
    # attention() has these too; what runs does not depend on them.
    for flag in ("return_lse", "check_values"):
        check_flag(flag, arguments.pop(flag, None))
    _check_arguments(name, describe_call, (query, *tensors), arguments)
    return describe_call(query, *tensors, **arguments)  # pyright: ignore


def checked_spec(
    name: str, spec: AnySpec, tensors: tuple[object, ...], arguments: dict[str, object]
) -> AnySpec:
    """A spec built by hand, given to the function ``name`` alone.

    Raises:
        TypeError, ValueError: it describes no call, or call arguments came with it.
    """
    if tensors or arguments:
        extra = ", ".join(arguments) or "tensors"
        raise TypeError(
            f"{name}({type(spec).__name__}) takes no further call arguments; got {extra}. "
            "Change the spec with its _replace()."
        )
    return check_any_spec(spec)


def _check_arguments(
    name: str,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    arguments: dict[str, object],
) -> None:
    """Raise in ``name``'s name unless ``function`` takes these arguments."""
    try:
        inspect.signature(function).bind(*positional, **arguments)
    except TypeError as error:
        called = "attention" if function is describe_call else getattr(function, "__name__", "it")
        raise TypeError(f"{name}(): {error}. Pass the arguments of {called}().") from None


def explain(
    query: Tensor | Spec | Callable[..., Any],
    *tensors: Any,
    device: str | None = None,
    backend: str | None = None,
    backward_backend: str | None = None,
    **arguments: object,
) -> Decision:
    """What ``attention()`` would run for these arguments, why, and why not the others.

    Takes ``attention()``'s arguments (real, meta or fake tensors) or a CallSpec. For another
    operation: its function and then that function's arguments, or its spec, as
    ``explain(lightning_indexer, index_query, ...)``. Never runs anything and never raises for a
    refusal: ``forward`` is None then. Print the result. While torch.compile traces, the answer
    for the call being traced becomes a constant of the graph.

    Args:
        query: the query, a spec built by hand, or a function of ``csa_dispatch.functional``.
        tensors: local_kv, sparse_kv, kv_indices, attention_sink, as for ``attention()``.
        device: ask about other hardware: "sm_103", "sm_90", "cpu". What is installed on this
            machine does not count then.
        backend, backward_backend: as for ``attention()``.
        arguments: ``attention()``'s keyword arguments.

    Raises:
        TypeError, ValueError: as ``attention()``; a spec that contradicts itself; or a device
            that does not parse.
    """
    backend, backward_backend = traced_arguments(backend, backward_backend)
    return _decided(
        query,
        *tensors,
        device=device,
        backend=backend,
        backward_backend=backward_backend,
        **arguments,
    )


@constant_when_traced
def _decided(
    query: Tensor | Spec | Callable[..., Any],
    *tensors: Any,
    device: str | None,
    backend: str | None,
    backward_backend: str | None,
    **arguments: object,
) -> Decision:
    spec: Any = _spec_of(query, tensors, arguments)
    hypothetical = device is not None
    if device is not None:
        device_type, capability = parse_device(device)
        spec = spec._replace(device_type=device_type, capability=capability)
    forced = forced_for(spec.operation, backend, backward_backend)
    return decide(spec, forced, current_policy(settings().policy), hypothetical=hypothetical)


def _spec_of(query: Any, tensors: tuple[Any, ...], arguments: dict[str, object]) -> Spec:
    """The spec of what ``explain`` was asked about."""
    if isinstance(query, tuple(SPECS.values())):
        return checked_spec("explain", query, tensors, arguments)
    if callable(query) and not isinstance(query, Tensor):
        described = describer(query)
        _check_arguments("explain", query, tensors, arguments)
        return described(*tensors, **arguments)
    return describe("explain", query, tensors, arguments)
