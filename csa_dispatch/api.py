"""``attention()``: the one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from . import generation
from .autograd import needs_of
from .call_spec import spec_of
from .forcing import forced_by, traced_arguments
from .layouts import LAYOUTS
from .policy import current_policy
from .prepared import (
    Arguments,
    Prepared,
    autocast_arguments,
    canonical,
    checked_call,
    is_plain,
    run,
    run_operator,
    signature,
)
from .runner import CACHE_SIZE, runner_for
from .settings import settings
from .tracing import constant_when_traced
from .transforms import any_autocast
from .validation import check_flag
from .value_checks import check_values as check_values_of

_prepared: dict[tuple[object, ...], Prepared] = {}


@constant_when_traced
def _choices(backend: str | None, backward_backend: str | None) -> tuple[str, str, bool]:
    """What is forced ("" for routing's choice) and whether to check values.

    While tracing this runs once, outside the graph: discovery and environment reads are not
    for dynamo to follow, and what is forced at trace time stays in the graph.
    """
    forced = forced_by(backend, backward_backend)
    return forced.forward or "", forced.backward or "", settings().check_values


@overload
def attention(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None = ...,
    kv_indices: Tensor | None = ...,
    attention_sink: Tensor | None = ...,
    *,
    sliding_window_size: int = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    scale: float | None = ...,
    doc_ids: Tensor | None = ...,
    compress_ratio: int | None = ...,
    layout: str = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
    backward_backend: str | None = ...,
    check_values: bool | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None = ...,
    kv_indices: Tensor | None = ...,
    attention_sink: Tensor | None = ...,
    *,
    sliding_window_size: int = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    scale: float | None = ...,
    doc_ids: Tensor | None = ...,
    compress_ratio: int | None = ...,
    layout: str = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
    backward_backend: str | None = ...,
    check_values: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
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
    return_lse: bool = False,
    backend: str | None = None,
    backward_backend: str | None = None,
    check_values: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compressed sparse attention: window, selected entries and sink under one softmax.

    For query ``t`` the keys are the last ``sliding_window_size`` rows of ``local_kv`` up to
    ``t`` and the selected rows of ``sparse_kv``; each key row is its own value. With logits
    ``z = scale * query . key``::

        output = sum(exp(z) * value) / (sum(exp(z)) + exp(sink))
        lse    = log(sum(exp(z)) + exp(sink))

    Differentiable once in query, local_kv, sparse_kv and attention_sink. A row that sees no key
    gives output 0, lse the sink (or -inf) and zero gradients. Rows of KV that nothing selects
    may hold anything, NaN included.

    Under autocast query and KV are cast to its dtype, as for scaled_dot_product_attention; the
    sink is not.

    Args:
        query: ``[B, H, T, D]`` (in ``layout``'s order) float64, float32, bfloat16 or float16.
        local_kv: ``[B, G, T, D]``, the query's dtype; G divides H.
        sparse_kv: pool ``[B, G, S, D]``, or None for window-only attention.
        kv_indices: ``[B, T, K]`` int32 or int64, shared by all heads. A slot is unused when
            negative or at or past the pool length (its document's, when packed); a repeated
            index counts as often as it occurs. Causality is the caller's.
        attention_sink: ``[H]`` in the query's dtype or float32, an unscaled logit in the
            denominator alone; its gradient has its dtype. +inf gives output 0 and gradients 0.
        sliding_window_size: rows of the window, the query's own included; 0 for none.
        cu_seqlens: int32 ``[N + 1]`` offsets of packed documents along T (B is 1). The window
            stays in its document. Rows past the last offset are undefined and get zero
            gradients. Negative offsets are documents that began before row 0.
        cu_seqlens_k: int32 ``[N + 1]`` offsets of the same documents along S; indices count
            from their document's first row. Optional for window-only attention.
        scale: positive multiplier of the logits (not of the sink); None means 1/sqrt(D).
        doc_ids: int ``[B, T]``, non-decreasing along T, instead of cu_seqlens: the window stays
            within equal ids; kv_indices address the batch's whole pool.
        compress_ratio: with ``kv_indices=None``, tokens per pool entry: query t sees every
            causally complete entry, ``j < (t - document start + 1) // compress_ratio``.
        layout: "BHSD", "BSHD", "SBHD" (KV ``[S, B, D]`` or ``[S, B, G, D]``) or "THD" (one
            packed row; kv_indices ``[T, K]``). Views, never copies.
        return_lse: also return lse: float32 (float64 for float64 queries) ``[B, H, T]``,
            ``[H, T]`` in THD; not differentiable.
        backend: run this backend or raise; None lets context, environment and policy choose.
        backward_backend: the same for the backward alone.
        check_values: check offsets and index ranges on the host (a sync) for debugging; None
            takes CSA_DISPATCH_CHECK_VALUES.

    Returns:
        The output in the query's shape, dtype and layout, or ``(output, lse)``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what it is and must be.
        BackendRefused: the forced backend cannot run the call, or nothing can; with Reasons.
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
    check_flag("return_lse", return_lse)
    check_flag("check_values", check_values)
    if any_autocast():
        arguments = autocast_arguments(arguments)
    if not is_plain(arguments):
        forward, backward, check = _choices(*traced_arguments(backend, backward_backend))
        if check_values is not None:
            check = check_values
        result = run_operator(arguments, checked_call(arguments), forward, backward, check)
        return result if return_lse else result[0]

    known = settings()
    check = known.check_values if check_values is None else check_values
    forced = forced_by(backend, backward_backend)
    policy = current_policy(known.policy)
    try:
        # The policy by id: hashing its rules would cost more than the call. An entry keeps it
        # alive.
        key = (signature(arguments), forced, id(policy), generation.current())
        prepared = _prepared.get(key)
    except (TypeError, RuntimeError):
        checked_call(arguments)
        raise
    if prepared is None:
        call = checked_call(arguments)
        needs = needs_of(call)
        runner = runner_for(spec_of(call, needs), forced, policy)
        prepared = Prepared(LAYOUTS[layout], call.scale, any(needs), runner, policy)
        if len(_prepared) >= CACHE_SIZE:
            _prepared.clear()
        _prepared[key] = prepared
    else:
        call = canonical(arguments, prepared.order, prepared.scale)
    if check:
        check_values_of(call)
    result = run(prepared, call)
    return result if return_lse else result[0]
