"""The Hopper kernels' door: which calls they take, and the forward's launch.

They run bf16 (and fp16 forward) calls of head_dim 512 with one KV head on compute capability
9.0, and gathered ones of head_dim 128. Everything else, and machines whose Triton has no fitting
Gluon, is left to the portable kernels. No data-dependent value ever reaches the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, TokenBounds

from . import hopper_window
from .hopper_operands import (
    HEAD_BLOCK,
    HEAD_DIM,
    LOG2_E,
    NARROW_HEAD_DIM,
    aligned,
    head_rows,
    plan_of,
    programs,
    slot_indices,
)
from .launching import launch

if TYPE_CHECKING:
    from csa_dispatch.call_spec import CallSpec

WORKSPACE = 512 * 2**20
"""Bytes that the fp32 dKV buffer, delta and the plan may take."""

PLAN_BYTES = 16
"""Of a token: ``hopper_plan``."""

ORDERED_SUMS = 128 * 2**20
"""Bytes the pool's fp32 sums may take in a deterministic backward, which needs other buffers."""

FORWARD = {"VALUE_REGISTERS": 160, "GATHER_REGISTERS": 64}
"""Registers of a thread by role; the scores warpgroup gets the rest of 512, 128.

Measured on an H200 at sizes A and B: 168 and 56 cost 1%, 168 and 48 cost 5%. Under 160 the value
warpgroups' wgmma are serialised for want of registers.
"""


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
        and spec.kv_heads == 1
        and spec.batch * spec.tokens * -(-spec.heads // HEAD_BLOCK) < 2**31
        and _gluon_fits()
    )


def supports_forward(spec: CallSpec) -> bool:
    """Whether ``forward`` takes calls of this kind.

    Up to 16 heads the portable kernel is faster: its tiles need not be 64 heads tall. Those of
    ``hopper_window`` are 4.
    """
    if hopper_window.takes_forward(spec.kind, spec.head_dim, spec.window, spec.heads, spec.tokens):
        fitting = True
    elif spec.head_dim == NARROW_HEAD_DIM:
        fitting = spec.kind is Kind.GATHER and spec.heads > 32
    else:
        fitting = spec.head_dim == HEAD_DIM and spec.heads > 16
    return fitting and _fits(spec) and spec.dtype in ("bfloat16", "float16")


def supports_backward(spec: CallSpec) -> bool:
    """Whether ``backward`` takes calls of this kind.

    Its fp32 sums must fit: those of both KV tensors in ``WORKSPACE``, or the pool's alone in
    ``ORDERED_SUMS`` when they are added in a fixed order; ``hopper_window`` needs neither. It
    would be wasteful for the sink's gradient alone, and for few heads of a dense-compressed call,
    of which the portable kernels put several tokens' into one tile. At head_dim 128 it has 64
    heads' tiles and atomics alone.
    """
    fitting = _fits(spec) and spec.dtype == "bfloat16" and any(spec.needs_grad[:3])
    if spec.head_dim == NARROW_HEAD_DIM:
        fitting &= spec.kind is Kind.GATHER and spec.heads > 32 and not spec.deterministic
    elif spec.head_dim != HEAD_DIM:
        return False
    if spec.kind is Kind.DENSE and spec.heads <= 16:
        return False
    if hopper_window.takes_backward(spec.kind, spec.head_dim, spec.window, spec.tokens):
        return fitting
    if spec.deterministic:
        pool_bytes = spec.batch * spec.pool * HEAD_DIM * 4
        return fitting and spec.kind is not Kind.DENSE and pool_bytes <= ORDERED_SUMS
    row_bytes = spec.head_dim * 4
    token_bytes = row_bytes + spec.heads * 4 + PLAN_BYTES
    return (
        fitting and spec.batch * (spec.tokens * token_bytes + spec.pool * row_bytes) <= WORKSPACE
    )


def forward(call: Call, bounds: TokenBounds | None) -> tuple[Tensor, Tensor]:
    """Output like the query and lse ``[B, H, T]`` fp32, the sink included."""
    batch, heads, tokens, head_dim = call.query.shape
    window = call.sliding_window_size
    if hopper_window.takes_forward(call.kind, head_dim, window, heads, tokens):
        return hopper_window.forward(call, bounds)
    if head_dim == NARROW_HEAD_DIM:
        from .hopper_narrow_forward import forward_kernel

        together, constants = 2, {}
    else:
        from .hopper_forward import forward_kernel

        together, constants = 1, FORWARD
    out = torch.empty_like(call.query)
    lse = call.query.new_empty((batch, heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    query, local = aligned(call.query), aligned(call.local_kv)
    pool = local if call.sparse_kv is None else aligned(call.sparse_kv)
    written = out if out.stride(-1) == 1 else torch.empty_like(query)
    sink = call.attention_sink
    indices, index_strides, slots = slot_indices(call)
    plan = plan_of(call, bounds, indices, index_strides, slots)
    items = batch * tokens * -(-heads // HEAD_BLOCK)
    launch(
        forward_kernel,
        (programs(query, items, together),),
        (
            *head_rows(query),
            *head_rows(local),
            *head_rows(pool),
            *head_rows(written),
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
        DENSE=call.kind is Kind.DENSE,
        **constants,
    )
    if written is not out:
        out.copy_(written)
    return out, lse


def backward(
    call: Call,
    bounds: TokenBounds | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> Gradients:
    """Gradients asked for by ``needs`` (query, local_kv, sparse_kv, attention_sink).

    KV gradients are summed in a fixed order when ``deterministic``.
    """
    _, _, tokens, head_dim = call.query.shape
    if hopper_window.takes_backward(call.kind, head_dim, call.sliding_window_size, tokens):
        return hopper_window.backward(call, bounds, output, lse, grad_output, needs)
    from .hopper_gradient import backward as backward_in

    return backward_in(call, bounds, output, lse, grad_output, needs, deterministic)
