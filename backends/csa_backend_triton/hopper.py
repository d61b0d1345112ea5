"""The Hopper kernels' door: which calls they take, and their launches.

They run bf16 (and fp16 forward) calls of head_dim 512 with one KV head on compute capability
9.0, gathered or window only. Everything else, and machines whose Triton has no fitting Gluon,
is left to the portable kernels. No data-dependent value ever reaches the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, TokenBounds

from .launching import launch

if TYPE_CHECKING:
    from csa_dispatch.call_spec import CallSpec

HEAD_DIM = 512
HEAD_BLOCK = 64
PLAN_TOKENS = 8
PLAN_SLOTS = 256
CAST_ROWS = 8
WORKSPACE = 512 * 2**20
"""Bytes the fp32 dKV buffer may take."""

FORWARD = {"VALUE_REGISTERS": 160, "GATHER_REGISTERS": 64}
"""Registers of a thread by role; the scores warpgroup gets the rest of 512, 128.

Measured on an H200 at sizes A and B: 168 and 56 cost 1%, 168 and 48 cost 5%. Under 160 the value
warpgroups' wgmma are serialised for want of registers.
"""

BACKWARD = {"MATRIX_REGISTERS": 192, "GATHER_REGISTERS": 32}
"""As above; the scatter warpgroup gets 96. With 184, wgmma are serialised: twice the time."""

LOG2_E = 1.4426950408889634


@lru_cache
def _gluon_fits() -> bool:
    try:
        from . import gluon_compat  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _fits(spec: CallSpec) -> bool:
    return (
        spec.capability == 90
        and spec.kind is not Kind.DENSE
        and spec.head_dim == HEAD_DIM
        and spec.kv_heads == 1
        and spec.batch * spec.tokens * -(-spec.heads // HEAD_BLOCK) < 2**31
        and _gluon_fits()
    )


def supports_forward(spec: CallSpec) -> bool:
    """Whether ``forward`` takes calls of this kind.

    Up to 16 heads the portable kernel is faster: its tiles need not be 64 heads tall.
    """
    return _fits(spec) and spec.heads > 16 and spec.dtype in ("bfloat16", "float16")


def supports_backward(spec: CallSpec) -> bool:
    """Whether ``backward`` takes calls of this kind.

    Its sums are atomic, so it is not deterministic; its fp32 buffer for the gradients of both
    KV tensors must fit in ``WORKSPACE``; and it would be wasteful for the sink's gradient alone.
    """
    rows = spec.batch * (spec.tokens + spec.pool)
    return (
        _fits(spec)
        and spec.dtype == "bfloat16"
        and not spec.deterministic
        and any(spec.needs_grad[:3])
        and rows * HEAD_DIM * 4 <= WORKSPACE
    )


@lru_cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _programs(query: Tensor, items: int) -> int:
    """Persistent programs: one a multiprocessor, since each needs all of its shared memory."""
    return min(_multiprocessors(query.device.index) if query.is_cuda else 132, items)


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy when its rows are not contiguous and 16-byte aligned."""
    rows_aligned = tensor.stride(-1) == 1 and all(s % 8 == 0 for s in tensor.stride()[:-1])
    if rows_aligned and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _rows(tensor: Tensor) -> tuple[Tensor | int, ...]:
    """A ``[B, H, T, D]`` tensor and its strides in units of 8 elements, as kernels take it."""
    return tensor, *(step // 8 for step in tensor.stride()[:3])


def _indices(call: Call) -> tuple[Tensor, tuple[int, int], int]:
    """kv_indices with contiguous slots, their strides over batch and token, and K.

    A call without slots gets a stand-in of one column, never read.
    """
    indices = call.kv_indices
    if indices is None or indices.shape[2] == 0:
        batch, _, tokens, _ = call.query.shape
        stand_in = torch.empty((), device=call.query.device, dtype=torch.int32)
        return stand_in.expand(batch, tokens, 1), (0, 0), 0
    if indices.stride(2) != 1:
        indices = indices.contiguous()
    return indices, (indices.stride(0), indices.stride(1)), indices.shape[2]


def _plan(
    call: Call,
    bounds: TokenBounds | None,
    indices: Tensor,
    index_strides: tuple[int, int],
    slots: int,
) -> Tensor:
    """The table of ``hopper_plan``, int32 ``[4, B * T]``."""
    from .hopper_plan import BLOCK_KEYS, plan_kernel

    batch, _, tokens, _ = call.query.shape
    rows = batch * tokens
    plan = torch.empty((4, rows), device=call.query.device, dtype=torch.int32)
    start, pool_start, pool_end = (None, None, None) if bounds is None else bounds
    strides = [
        (0, 0) if table is None else table.stride() for table in (start, pool_start, pool_end)
    ]
    launch(
        plan_kernel,
        (-(-rows // PLAN_TOKENS),),
        (
            indices,
            start,
            pool_start,
            pool_end,
            plan,
            *index_strides,
            *(step for pair in strides for step in pair),
            rows,
            tokens,
            slots,
            0 if call.sparse_kv is None else call.sparse_kv.shape[2],
            min(call.sliding_window_size, tokens),
        ),
        warps=4,
        HAS_BOUNDS=bounds is not None,
        TOKENS=PLAN_TOKENS,
        SLOTS=PLAN_SLOTS,
        KEYS=BLOCK_KEYS,
    )
    return plan


def forward(call: Call, bounds: TokenBounds | None) -> tuple[Tensor, Tensor]:
    """Output like the query and lse ``[B, H, T]`` fp32, the sink included."""
    from .hopper_forward import forward_kernel

    batch, heads, tokens, _ = call.query.shape
    out = torch.empty_like(call.query)
    lse = call.query.new_empty((batch, heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    query, local = _aligned(call.query), _aligned(call.local_kv)
    pool = local if call.sparse_kv is None else _aligned(call.sparse_kv)
    written = out if out.stride(-1) == 1 else torch.empty_like(query)
    sink = call.attention_sink
    indices, index_strides, slots = _indices(call)
    plan = _plan(call, bounds, indices, index_strides, slots)
    items = batch * tokens * -(-heads // HEAD_BLOCK)
    launch(
        forward_kernel,
        (_programs(query, items),),
        (
            *_rows(query),
            *_rows(local),
            *_rows(pool),
            *_rows(written),
            plan,
            indices,
            *index_strides,
            heads,
            tokens,
            slots,
            batch * tokens,
            items,
            None if sink is None else sink.contiguous(),
            lse,
            call.scale * LOG2_E,
        ),
        warps=4,
        **FORWARD,
    )
    if written is not out:
        out.copy_(written)
    return out, lse


def _cast(rows: Tensor, like: Tensor) -> Tensor:
    """A KV gradient ``[B, 1, N, D]`` from its fp32 rows ``[B * N, D]`` in the kernel's order."""
    from .hopper_cast import cast_kernel

    gradient = torch.empty_like(like)
    if gradient.numel() == 0:
        return gradient
    written = (
        gradient
        if gradient.stride(-1) == 1
        else torch.empty(like.shape, device=like.device, dtype=like.dtype)
    )
    launch(
        cast_kernel,
        (-(-rows.shape[0] // CAST_ROWS),),
        (rows, written, written.stride(0), written.stride(2), like.shape[2], rows.shape[0]),
        warps=4,
        D=HEAD_DIM,
        ROWS=CAST_ROWS,
    )
    return gradient if written is gradient else gradient.copy_(written)


def backward(
    call: Call,
    bounds: TokenBounds | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Gradients asked for by ``needs`` (query, local_kv, sparse_kv, attention_sink)."""
    from .hopper_backward import backward_kernel
    from .operands import operands_of
    from .sink_gradient import sink_gradient
    from .upstream import Upstream

    batch, heads, tokens, _ = call.query.shape
    pool_rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    query, local = _aligned(call.query), _aligned(call.local_kv)
    pool = local if call.sparse_kv is None else _aligned(call.sparse_kv)
    incoming, result = _aligned(grad_output), _aligned(output)
    indices, index_strides, slots = _indices(call)
    plan = _plan(call, bounds, indices, index_strides, slots)
    # Tokens without keys keep the 0, whatever grad_output holds.
    delta = torch.zeros_like(lse)

    grad_query = torch.empty_like(call.query) if needs[0] else None
    written = grad_query
    if grad_query is not None and grad_query.stride(-1) != 1:
        written = torch.empty_like(query)
    rows = batch * tokens
    accumulated = torch.zeros(
        (rows + batch * pool_rows, HEAD_DIM), device=query.device, dtype=torch.float32
    )
    items = rows * -(-heads // HEAD_BLOCK)
    launch(
        backward_kernel,
        (_programs(query, items),),
        (
            *_rows(query),
            *_rows(incoming),
            *_rows(local),
            *_rows(pool),
            *_rows(result),
            *_rows(query if written is None else written),
            plan,
            indices,
            *index_strides,
            heads,
            tokens,
            slots,
            rows,
            items,
            lse,
            delta,
            accumulated,
            pool_rows,
            call.scale,
            call.scale * LOG2_E,
        ),
        warps=4,
        QUERY_GRADIENT=int(needs[0]),
        LOCAL_GRADIENT=int(needs[1]),
        POOL_GRADIENT=int(needs[2]),
        **BACKWARD,
    )
    if written is not None and grad_query is not None and written is not grad_query:
        grad_query.copy_(written)
    grad_local = _cast(accumulated[:rows], call.local_kv) if needs[1] else None
    grad_pool = None
    if needs[2] and call.sparse_kv is not None:
        grad_pool = _cast(accumulated[rows:], call.sparse_kv)
    grad_sink = None
    if needs[3] and call.attention_sink is not None:
        upstream = Upstream(operands_of(call, bounds), output, lse, grad_output, delta)
        grad_sink = sink_gradient(upstream, call.attention_sink)
    return Gradients(grad_query, grad_local, grad_pool, grad_sink)
