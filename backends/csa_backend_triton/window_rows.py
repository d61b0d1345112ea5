"""Launcher of ``window_rows_kernel``: the window's key blocks as their last readers get done."""

from __future__ import annotations

import torch
from torch import Tensor

from .launching import capability_of, launch, programs_to_fill
from .operands import Operands
from .stored_scores import CHUNK_BYTES, WINDOW_KEYS, Stored, kept_tokens, score_bytes
from .tile_table import WindowTile, window_rows_tile
from .upstream import Upstream
from .window_rows_kernel import window_rows_kernel

MAX_WINDOW = 512
"""Longer windows are recomputed: keeping their scores would fill the workspace."""


def partial_bytes(operands: Operands) -> int:
    """Most that partial sums of a chunk's key blocks, two or more of each, take with their sum."""
    columns = 256  # of the widest ``window_rows_tile``
    return programs_to_fill(operands.call.query) * WINDOW_KEYS * columns * 4 * 3 // 2


def keeps_window(operands: Operands) -> bool:
    """Whether the window's gradient comes from stored scores rather than from new ones.

    Recomputing takes the whole head dimension in registers, so wide heads store. So does bf16 of
    head_dim 128, which gains a tenth on an H200, and with more than 32 heads of 192 or 256, where
    whole backwards took 0.66 to 0.97 of the time; fewer heads took up to 1.7. Tiles that pack
    several tokens' heads do not store: their groups are too small to gain. Nor may what is kept
    beside a chunk fill its share of the workspace, as thousands of slots would.
    """
    size = operands.head_dim.size
    narrow = size == 128 or (size in (192, 256) and operands.group > 32)
    gains = size > 256 or (narrow and operands.call.query.dtype == torch.bfloat16)
    if not gains or operands.group <= 4 or not 0 < operands.window <= MAX_WINDOW:
        return False
    kept_bytes = score_bytes(operands, operands.window + operands.slots)
    return kept_tokens(operands) * kept_bytes <= CHUNK_BYTES * 3 // 4


class WindowRows:
    """The gradient of ``local_kv`` in the making."""

    def __init__(self, upstream: Upstream, stored: Stored, tile: WindowTile | None) -> None:
        self._upstream = upstream
        self._stored = stored
        query = upstream.operands.call.query
        batch, _, tokens, head_dim = query.shape
        self._tile = tile or window_rows_tile(
            capability_of(query),
            upstream.operands.group,
            head_dim,
            query.element_size(),
        )
        self._blocks = -(-tokens // WINDOW_KEYS)
        self._done = 0
        kv_heads = upstream.operands.kv_heads
        self._rows = query.new_empty((batch, kv_heads, self._blocks, WINDOW_KEYS, head_dim))

    def advance(self, end: int) -> None:
        """Finish the key blocks whose readers are all among the first ``end`` flat tokens."""
        operands = self._upstream.operands
        tokens = operands.call.query.shape[2]
        batch, token = divmod(end, tokens)
        ready = batch * self._blocks + max((token - operands.window + 1) // WINDOW_KEYS, 0)
        if ready > self._done:
            self._finish(self._done, ready)
            self._done = ready

    def gradient(self) -> Tensor:
        """``[B, G, T, D]``."""
        return self._rows.flatten(2, 3)[:, :, : self._upstream.operands.call.query.shape[2]]

    def _finish(self, first: int, end: int) -> None:
        operands, _, lse, grad_output, delta = self._upstream
        query, tile = operands.call.query, self._tile
        tokens, head_dim = query.shape[2], query.shape[3]
        pieces = -(-head_dim // tile.columns)
        programs = (end - first) * pieces * operands.kv_heads
        parts = max(min(programs_to_fill(query) // programs, operands.window), 1)
        shape = (end - first, operands.kv_heads, WINDOW_KEYS, head_dim)
        if parts > 1:
            target = query.new_empty((parts, *shape), dtype=torch.float32)
        elif operands.kv_heads == 1:
            target = self._rows.flatten(0, 2)[first:end]
        else:
            target = query.new_empty(shape)
        window_start, *_ = operands.tables
        launch(
            window_rows_kernel,
            ((end - first) * pieces * parts, operands.kv_heads),
            (
                query,
                window_start,
                grad_output,
                lse,
                delta,
                self._stored.p,
                self._stored.ds,
                target,
                *query.stride(),
                *operands.table_strides[:2],
                *grad_output.stride(),
                tokens,
                operands.window,
                first,
                parts,
                self._stored.ring,
                self._stored.places,
                self._stored.padded_heads,
            ),
            warps=tile.warps,
            BOUNDED=operands.bounds is not None,
            RANGE=self._upstream.is_float16,
            GROUP=operands.group,
            D=head_dim,
            COLUMNS=tile.columns,
            HEADS=tile.heads,
            KEYS=WINDOW_KEYS,
            STAGES=tile.stages,
        )
        if parts > 1:
            self._keep(target.sum(0), first)
        elif operands.kv_heads > 1:
            self._keep(target, first)

    def _keep(self, rows: Tensor, first: int) -> None:
        """Put the rows of whole key blocks, ``[blocks, G, keys, D]``, where they belong."""
        end = first + rows.shape[0]
        for batch in range(first // self._blocks, -(-end // self._blocks)):
            start = batch * self._blocks
            lowest, highest = max(first, start), min(end, start + self._blocks)
            target = self._rows[batch, :, lowest - start : highest - start]
            target.copy_(rows[lowest - first : highest - first].transpose(0, 1))
