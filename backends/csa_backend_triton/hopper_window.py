"""The Hopper kernels of window-only calls: which calls they take, and their launches.

They are for windows of up to 128 keys, which fit a multiprocessor's shared memory whole. The
backward works on chunks of tokens, whose P and dS it keeps.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from csa_dispatch.call import Call, Gradients, Kind, TokenBounds

from .hopper_operands import HEAD_DIM, LOG2_E, aligned, head_rows, multiprocessors
from .launching import launch
from .operands import operands_of
from .sink_gradient import sink_gradient
from .upstream import Upstream
from .workspace import room

WINDOW = 128
"""Keys that fit."""

RUN = 32
"""Tokens a program has the keys of."""

GROUP = 4
"""Heads of a tile; a run has two tiles, one a half, for each of these."""

MAIN_REGISTERS, LOAD_REGISTERS = 224, 56
"""Of a thread, by its warpgroup's role: 504 for two main ones and one that loads."""

RUN_KEYS = RUN + WINDOW

TILE_ROWS = 64

MORE = 16
"""Keys of a tile beside the 128."""

CARRIED = WINDOW // RUN
"""Runs at a chunk's end whose keys the next chunk's tokens see."""

CHUNK_BYTES = 384 << 20
"""Most that P, dS and sums of a chunk of tokens take."""

SUM_ROWS = 4

FEWEST_ROWS = 16384
"""Tokens times heads of a forward; that few take less time than loading their runs' keys."""

FEWEST_TALL_ROWS = 65536
"""Of one of more than 16 heads, which ``hopper_forward`` is quicker to start."""

FEWEST_TOKENS = 512
"""Of a backward, likewise. Neither counts the batch, which no token's results may depend on."""

KEYS_COST = 1.2
"""What loading a run's keys takes, in times of two tiles."""


def _fits(kind: Kind, head_dim: int, window: int) -> bool:
    return kind is Kind.WINDOW and head_dim == HEAD_DIM and 0 < window <= WINDOW


def takes_forward(kind: Kind, head_dim: int, window: int, heads: int, tokens: int) -> bool:
    """Whether ``forward`` is for such calls, of those the Hopper kernels can run."""
    fewest = FEWEST_ROWS if heads <= 16 else FEWEST_TALL_ROWS
    return _fits(kind, head_dim, window) and heads * tokens >= fewest


def takes_backward(kind: Kind, head_dim: int, window: int, tokens: int) -> bool:
    """Whether ``backward`` is for such calls, of those the Hopper kernels can run."""
    return _fits(kind, head_dim, window) and tokens >= FEWEST_TOKENS


@lru_cache
def split_heads(runs: int, heads: int, programs: int) -> tuple[int, int]:
    """How many programs share a run, and the groups of 4 heads of each, to end soonest.

    ``programs`` run at once.
    """
    groups = -(-heads // GROUP)

    def cost(splits: int) -> float:
        return -(-runs * splits // programs) * (-(-groups // splits) + KEYS_COST)

    splits = min(range(1, groups + 1), key=cost)
    split_groups = -(-groups // splits)
    return -(-groups // split_groups), split_groups


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
    runs = batch * -(-tokens // RUN)
    splits, split_groups = split_heads(runs, heads, multiprocessors(query))
    sink = call.attention_sink
    launch(
        window_forward_kernel,
        (runs * splits,),
        (
            *head_rows(query),
            *head_rows(aligned(call.local_kv)),
            *head_rows(written),
            *window_start(bounds),
            heads,
            tokens,
            call.sliding_window_size,
            splits,
            split_groups,
            None if sink is None else sink.contiguous(),
            lse,
            call.scale * LOG2_E,
        ),
        warps=4,
        ATTEND_REGISTERS=MAIN_REGISTERS,
        LOAD_REGISTERS=LOAD_REGISTERS,
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
) -> Gradients:
    """Gradients asked for by ``needs`` (query, local_kv, sparse_kv, attention_sink).

    All sums are taken in a fixed order.
    """
    from .hopper_window_backward import window_backward_kernel

    batch, heads, tokens, _ = call.query.shape
    runs = batch * -(-tokens // RUN)
    query, local, upstream = (aligned(x) for x in (call.query, call.local_kv, grad_output))
    grad_query = written = torch.empty_like(call.query) if needs[0] else None
    if grad_query is not None and grad_query.stride(-1) != 1:
        written = torch.empty_like(query)
    delta = torch.empty_like(lse)
    keys = _KeyGradient(call, query, upstream, lse, delta) if needs[1] else None
    chunk_runs = runs if keys is None else keys.chunk_runs
    stored = [query] * 4 if keys is None else keys.stored
    sizes = (*window_start(bounds), heads, tokens, call.sliding_window_size)
    for first in range(0, runs, max(chunk_runs, 1)):
        count = min(chunk_runs, runs - first)
        splits, split_groups = split_heads(count, heads, multiprocessors(query))
        launch(
            window_backward_kernel,
            (count * splits,),
            (
                *head_rows(query),
                *head_rows(upstream),
                *head_rows(local),
                *head_rows(query if written is None else written),
                *sizes,
                splits,
                split_groups,
                first,
                lse,
                delta,
                *stored,
                call.scale,
                call.scale * LOG2_E,
            ),
            warps=4,
            QUERY_GRADIENT=int(needs[0]),
            KEY_GRADIENT=int(needs[1]),
            DIFFERENTIATE_REGISTERS=MAIN_REGISTERS,
            LOAD_REGISTERS=LOAD_REGISTERS,
        )
        if keys is not None:
            keys.add(sizes, first, count)
    if grad_query is not None and written is not None and written is not grad_query:
        grad_query.copy_(written)
    grad_sink = None
    if needs[3] and call.attention_sink is not None:
        upstream_of = Upstream(operands_of(call, bounds), output, lse, grad_output, delta)
        grad_sink = sink_gradient(upstream_of, call.attention_sink)
    return Gradients(grad_query, None if keys is None else keys.finished(), None, grad_sink)


class _KeyGradient:
    """local_kv's gradient, chunk by chunk."""

    def __init__(
        self, call: Call, query: Tensor, upstream: Tensor, lse: Tensor, delta: Tensor
    ) -> None:
        batch, heads, tokens, _ = query.shape
        self.query, self.upstream, self.lse, self.delta = query, upstream, lse, delta
        self.tokens, self.runs = tokens, batch * -(-tokens // RUN)
        # Two programs, of half of the columns each, share what is split here.
        self.splits, self.split_groups = split_heads(2 * self.runs, heads, multiprocessors(query))
        tile_rows = 2 * -(-heads // GROUP) * TILE_ROWS
        run_bytes = tile_rows * 2 * 2 * (WINDOW + MORE) + self.splits * RUN_KEYS * HEAD_DIM * 4
        chunk_runs = room(CHUNK_BYTES, 0, batch, heads, tokens) // run_bytes
        # Whole rounds of programs, two a run: a few runs more would take a round of their own.
        round_runs = max(multiprocessors(query) // 2, 1)
        if round_runs < chunk_runs < self.runs:
            chunk_runs -= chunk_runs % round_runs
        self.chunk_runs = min(max(chunk_runs, CARRIED), self.runs)
        stored_rows = self.chunk_runs * tile_rows
        self.stored = [query.new_empty((stored_rows, n)) for n in (WINDOW, MORE) * 2]
        self.sums = query.new_empty(
            (CARRIED + self.chunk_runs, self.splits, RUN_KEYS, HEAD_DIM), dtype=torch.float32
        )
        self.gradient = self.written = torch.empty_like(call.local_kv)
        if self.gradient.stride(-1) != 1:
            self.written = torch.empty(call.local_kv.shape, device=query.device, dtype=query.dtype)

    def add(self, sizes: tuple, first: int, count: int) -> None:
        """Add a chunk's part, whose P and dS are ``stored``, and write the keys that it ends."""
        from .hopper_window_key_gradient import window_key_gradient_kernel
        from .window_key_sums_kernel import window_key_sums_kernel

        launch(
            window_key_gradient_kernel,
            (2 * count * self.splits,),
            (
                *head_rows(self.query),
                *head_rows(self.upstream),
                *sizes,
                self.splits,
                self.split_groups,
                first,
                self.lse,
                self.delta,
                *self.stored,
                self.sums[CARRIED:],
            ),
            warps=8,
        )
        end = first + count
        lowest = max(first * RUN - WINDOW, 0)
        complete = end * RUN if end == self.runs else end * RUN - WINDOW
        launch(
            window_key_sums_kernel,
            (-(-(complete - lowest) // SUM_ROWS),),
            (
                self.sums,
                self.written,
                self.written.stride(0),
                self.written.stride(2),
                self.tokens,
                lowest,
                complete,
                first - CARRIED,
                self.splits,
            ),
            warps=4,
            WINDOW=WINDOW,
            RUN=RUN,
            D=HEAD_DIM,
            ROWS=SUM_ROWS,
        )
        if end < self.runs:
            # The next chunk's tokens see the last keys too.
            self.sums[:CARRIED].copy_(self.sums[count : count + CARRIED])

    def finished(self) -> Tensor:
        """The gradient, once all chunks are added."""
        if self.written is not self.gradient:
            self.gradient.copy_(self.written)
        return self.gradient
