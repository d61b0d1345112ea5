"""The Hopper kernels of window-only calls: which calls they take, and their launches.

They are for windows of up to 128 keys, which fit a multiprocessor's shared memory whole. The
backward works on chunks of tokens, whose P and dS it keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, TokenBounds

from .hopper_operands import HEAD_BLOCK, HEAD_DIM, LOG2_E, aligned, head_rows, multiprocessors
from .launching import launch
from .operands import operands_of
from .sink_gradient import sink_gradient
from .upstream import Upstream

WINDOW = 128
"""Keys that fit."""

RUN_MULTIPLE = 16
"""Tokens of a run are a multiple of this."""

FORWARD_REGISTERS = {"CONSUMER_REGISTERS": 152, "COPY_REGISTERS": 56}
"""Of a thread by role; three warpgroups consume and one copies."""

BACKWARD_REGISTERS = {"CONSUMER_REGISTERS": 224, "COPY_REGISTERS": 56}
"""Of a thread by role; two warpgroups consume and one copies."""

KEY_GRADIENT_REGISTERS = {"CONSUMER_REGISTERS": 208, "COPY_REGISTERS": 88}
"""Likewise."""

SLOTS = 144
"""Slots of a token's P and dS."""

CHUNK_BYTES = 320 << 20
"""Most that P and dS of a chunk take."""

SUM_ROWS = 4


def takes(kind: Kind, head_dim: int, window: int) -> bool:
    """Whether the kernels here are for such calls, of those the Hopper kernels take."""
    return kind is Kind.WINDOW and head_dim == HEAD_DIM and 0 < window <= WINDOW


def run_length(rows: int, programs: int) -> int:
    """Tokens of each of so many programs' runs, which cover ``rows`` tokens."""
    share = -(-rows // programs)
    return -(-share // RUN_MULTIPLE) * RUN_MULTIPLE


def window_start(bounds: TokenBounds | None) -> tuple[Tensor | None, int, int]:
    """Each token's first visible position and its strides over batch and token."""
    if bounds is None:
        return None, 0, 0
    start = bounds[0]
    return start, start.stride(0), start.stride(1)


def forward(call: Call, bounds: TokenBounds | None) -> tuple[Tensor, Tensor]:
    """Output like the query and lse ``[B, H, T]`` fp32, the sink included."""
    from .hopper_window_forward import window_forward_kernel

    batch, heads, tokens, _ = call.query.shape
    out = torch.empty_like(call.query)
    lse = call.query.new_empty((batch, heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    query = aligned(call.query)
    written = out if out.stride(-1) == 1 else torch.empty_like(query)
    rows = batch * tokens
    run_tokens = run_length(rows, multiprocessors(query))
    sink = call.attention_sink
    launch(
        window_forward_kernel,
        (-(-rows // run_tokens),),
        (
            *head_rows(query),
            *head_rows(aligned(call.local_kv)),
            *head_rows(written),
            *window_start(bounds),
            heads,
            tokens,
            rows,
            call.sliding_window_size,
            run_tokens,
            None if sink is None else sink.contiguous(),
            lse,
            call.scale * LOG2_E,
        ),
        warps=4,
        **FORWARD_REGISTERS,
    )
    if written is not out:
        out.copy_(written)
    return out, lse


def chunk_tokens(rows: int, head_blocks: int) -> int:
    """Tokens of a chunk: as few chunks as there is room for, of about one size."""
    room = CHUNK_BYTES // (head_blocks * HEAD_BLOCK * SLOTS * 2 * 2)
    chunks = -(-rows // max(room // RUN_MULTIPLE * RUN_MULTIPLE, RUN_MULTIPLE))
    return run_length(rows, chunks)


def backward(
    call: Call,
    bounds: TokenBounds | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Gradients asked for by ``needs`` (query, local_kv, sparse_kv, attention_sink).

    All sums are taken in a fixed order.
    """
    from .hopper_window_backward import window_backward_kernel
    from .hopper_window_key_gradient import window_key_gradient_kernel
    from .window_key_sums_kernel import window_key_sums_kernel

    batch, heads, tokens, _ = call.query.shape
    rows, head_blocks = batch * tokens, -(-heads // HEAD_BLOCK)
    query, local, upstream = (aligned(x) for x in (call.query, call.local_kv, grad_output))
    grad_query = written = torch.empty_like(call.query) if needs[0] else None
    if grad_query is not None and grad_query.stride(-1) != 1:
        written = torch.empty_like(query)
    grad_local = torch.empty_like(call.local_kv) if needs[1] else None
    keys_written = grad_local
    if grad_local is not None and grad_local.stride(-1) != 1:
        keys_written = torch.empty_like(local)
    delta = torch.empty_like(lse)

    chunk = chunk_tokens(rows, head_blocks)
    sizes = (*window_start(bounds), heads, tokens, rows, call.sliding_window_size)
    new = call.query.new_empty
    items = chunk * head_blocks if needs[1] else 0
    scores = [new((items, HEAD_BLOCK, n)) for n in (WINDOW, SLOTS - WINDOW) * 2]
    sums_run = run_length(chunk, max(multiprocessors(query) // 2, 1))
    runs = -(-chunk // sums_run) if needs[1] else 0
    sums = new((runs, sums_run + WINDOW, HEAD_DIM), dtype=torch.float32)
    carry = [new((WINDOW, HEAD_DIM), dtype=torch.float32) for _ in range(2)]
    for first in range(0, rows, chunk):
        end = min(first + chunk, rows)
        run_tokens = run_length(end - first, multiprocessors(query))
        launch(
            window_backward_kernel,
            (-(-(end - first) // run_tokens),),
            (
                *head_rows(query),
                *head_rows(upstream),
                *head_rows(local),
                *head_rows(query if written is None else written),
                *sizes,
                run_tokens,
                first,
                end,
                lse,
                delta,
                *scores,
                call.scale,
                call.scale * LOG2_E,
            ),
            warps=4,
            QUERY_GRADIENT=int(needs[0]),
            KEY_GRADIENT=int(needs[1]),
            **BACKWARD_REGISTERS,
        )
        if keys_written is None:
            continue
        launch(
            window_key_gradient_kernel,
            (-(-(end - first) // sums_run) * 2,),
            (
                *head_rows(query),
                *head_rows(upstream),
                *sizes,
                sums_run,
                first,
                end,
                lse,
                delta,
                *scores,
                sums,
            ),
            warps=4,
            **KEY_GRADIENT_REGISTERS,
        )
        lowest = max(first - WINDOW + 1, 0)
        launch(
            window_key_sums_kernel,
            (-(-(end - lowest) // SUM_ROWS),),
            (
                sums,
                *carry,
                keys_written,
                keys_written.stride(0),
                keys_written.stride(2),
                rows,
                tokens,
                lowest,
                first,
                end,
                sums_run,
            ),
            warps=4,
            WINDOW=WINDOW,
            D=HEAD_DIM,
            ROWS=SUM_ROWS,
        )
        carry.reverse()
    for gradient, held in ((grad_query, written), (grad_local, keys_written)):
        if gradient is not None and held is not None and held is not gradient:
            gradient.copy_(held)
    grad_sink = None
    if needs[3] and call.attention_sink is not None:
        upstream_of = Upstream(operands_of(call, bounds), output, lse, grad_output, delta)
        grad_sink = sink_gradient(upstream_of, call.attention_sink)
    return Gradients(grad_query, grad_local, None, grad_sink)
