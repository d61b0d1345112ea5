"""Tile sizes by architecture, direction, head dimension, rows and element size.

A tile keeps its queries and its stages' keys in shared memory, and what a block of threads may
use differs: 227 KB on SM90, 100 and 103 (where a product's operands need copies of their own),
163 KB on SM80, 99 KB on SM86, 89 and 120. Tables are data: ``{D class: {rows: (keys, warps,
stages, cap on registers if any)}}``, the D class being the head dimension's upper bound. Hopper's
figures were chosen by measurement on an H200 (docs/performance.md), the others by shared memory
and registers alone.
The compile tests build every entry for every architecture.

A bound that is no multiple of 16 is only for head dimensions that are none either. Triton tells
strides apart by that alone, so it reads their rows element by element, not 16 bytes at a time, and
keeps an address and a mask for each element. Where that is too much for a thread ptxas may give
up: it then takes 32 registers and spills tens of kilobytes.
"""

from __future__ import annotations

from typing import NamedTuple

Table = dict[int, dict[int, tuple[int, ...]]]


class Tile(NamedTuple):
    """Sizes of one program: query rows, keys a step, warps, pipeline stages.

    ``registers`` caps a thread's registers so that more programs share a multiprocessor; 0 sets
    no cap.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


def family(capability: int) -> str:
    """The tables' name for a compute capability; unknown ones get the smallest tiles."""
    if capability == 90:
        return "hopper"
    if capability in (100, 103):
        return "blackwell"
    return "163 KB" if capability in (80, 87) else "99 KB"


def _but(table: Table, changes: Table) -> Table:
    """A table of its own like another one, but for some head dimensions."""
    return {bound: dict(entries) for bound, entries in (table | changes).items()}


FORWARD: dict[str, Table] = {
    "hopper": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        # Three programs a multiprocessor instead of two: the cap is worth a third at 64 rows.
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 2, 168)},
        256: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 2)},
        # A cap gains at 384 and 512, and loses a tenth at 320.
        320: {16: (64, 4, 2), 32: (64, 8, 2), 64: (64, 8, 2)},
        512: {16: (32, 4, 2, 128), 32: (64, 8, 2), 64: (64, 8, 2)},
        576: {16: (32, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
    },
    "163 KB": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        256: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 8, 2)},
        # ptxas gives up on 32 keys of 64 rows. Eight warps would each do another's products again.
        319: {16: (32, 4, 2), 32: (32, 4, 2), 64: (16, 4, 2)},
        512: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 8, 2)},
        576: {16: (32, 4, 2), 32: (32, 8, 2)},
    },
    "99 KB": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        128: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2)},
        256: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 8, 2)},
        512: {16: (32, 4, 1), 32: (16, 4, 2)},
        576: {16: (16, 4, 2), 32: (16, 4, 1)},
    },
}
FORWARD["blackwell"] = _but(
    FORWARD["hopper"],
    {
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        320: {16: (64, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
        512: {16: (64, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
        576: {16: (32, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
    },
)

TOKEN_GRADIENT: dict[str, Table] = {
    "hopper": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        # As in the forward; (64, 4, 2) without a cap is the measured alternative at 64 rows.
        128: {16: (64, 4, 2), 32: (64, 4, 2), 64: (32, 4, 2, 168)},
        256: {16: (32, 4, 2), 32: (32, 4, 2), 64: (64, 8, 2)},
        512: {16: (32, 4, 2, 168), 32: (32, 8, 2), 64: (64, 8, 1)},
        576: {16: (32, 4, 2), 32: (16, 8, 2), 64: (32, 8, 1)},
    },
    "163 KB": {
        64: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2)},
        128: {16: (64, 4, 2), 32: (64, 4, 2), 64: (32, 4, 2)},
        256: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 8, 2)},
        512: {16: (32, 4, 2), 32: (16, 8, 2)},
        576: {16: (16, 4, 2), 32: (16, 8, 1)},
    },
    "99 KB": {
        64: {16: (64, 4, 2), 32: (64, 4, 2), 64: (32, 4, 2)},
        128: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 4, 1)},
        256: {16: (32, 4, 2), 32: (16, 4, 2)},
        512: {16: (16, 4, 2)},
        576: {16: (16, 4, 1)},
    },
}
TOKEN_GRADIENT["blackwell"] = _but(
    TOKEN_GRADIENT["hopper"],
    {
        128: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2)},
        512: {16: (32, 4, 2), 32: (32, 8, 2), 64: (32, 8, 1)},
        576: {16: (32, 4, 2), 32: (16, 8, 2), 64: (16, 8, 1)},
    },
)

# Here ``rows`` are the queries a step and ``keys`` the key rows a program owns.
KEY_GRADIENT: dict[str, Table] = {
    "hopper": {
        64: {64: (64, 4, 2)},
        128: {64: (64, 4, 2)},
        256: {64: (64, 8, 1)},
        512: {64: (32, 8, 1)},
        576: {32: (32, 8, 1)},
    },
    "163 KB": {
        64: {64: (64, 4, 2)},
        128: {64: (64, 8, 2)},
        256: {32: (64, 8, 1)},
        512: {32: (32, 8, 1)},
        576: {16: (32, 8, 1)},
    },
    "99 KB": {
        64: {64: (64, 4, 2)},
        128: {32: (64, 4, 2)},
        256: {32: (32, 4, 1)},
        512: {16: (32, 8, 1)},
        576: {16: (16, 8, 1)},
    },
}
# ptxas gives up on 64 queries of such head dimensions.
KEY_GRADIENT["blackwell"] = _but(KEY_GRADIENT["hopper"], {511: {32: (32, 8, 1)}})

TABLES = {"forward": FORWARD, "token_gradient": TOKEN_GRADIENT, "key_gradient": KEY_GRADIENT}
"""By the kernel they are for, less its ``_kernel``. fp32 has tables of its own, not tuned."""


def take_tables(tables: dict[str, dict[str, Table]]) -> None:
    """Put the entries of another process's ``TABLES`` in force."""
    for name, by_family in tables.items():
        TABLES[name].update(by_family)


# fp32 has no tensor-core form within its error budget: every product is fused multiply-adds.
FLOAT32: dict[str, Table] = {
    "forward": {
        128: {16: (32, 4, 1), 32: (32, 4, 1)},
        256: {16: (32, 4, 1)},
        512: {16: (16, 8, 1)},
        576: {16: (16, 8, 1)},
    },
    "token_gradient": {
        128: {16: (32, 4, 1)},
        256: {16: (16, 4, 1)},
        512: {8: (16, 4, 1)},
        576: {8: (16, 4, 1)},
    },
    "key_gradient": {
        128: {16: (32, 4, 1)},
        256: {16: (16, 4, 1)},
        512: {16: (8, 4, 1)},
        576: {16: (8, 4, 1)},
    },
}


def head_dim_class(table: Table, head_dim: int) -> int:
    """The key of ``table`` that a head dimension falls under."""
    uneven = head_dim % 16 != 0
    return min(bound for bound in table if bound >= head_dim and (uneven or bound % 16 == 0))


def _entry(table: Table, head_dim: int, rows: int) -> Tile:
    by_rows = table[head_dim_class(table, head_dim)]
    fitting = [size for size in by_rows if size >= rows]
    chosen = min(fitting) if fitting else max(by_rows)
    return Tile(chosen, *by_rows[chosen])


def forward_tile(capability: int, head_dim: int, rows: int, float32: bool) -> Tile:
    """Tile of ``forward_kernel`` for up to ``rows`` useful rows (heads, or heads and tokens)."""
    table = FLOAT32["forward"] if float32 else FORWARD[family(capability)]
    return _entry(table, head_dim, rows)


def token_gradient_tile(capability: int, head_dim: int, rows: int, float32: bool) -> Tile:
    """Tile of ``token_gradient_kernel``, chosen like the forward's."""
    table = FLOAT32["token_gradient"] if float32 else TOKEN_GRADIENT[family(capability)]
    return _entry(table, head_dim, rows)


def key_gradient_tile(capability: int, head_dim: int, float32: bool) -> Tile:
    """Tile of ``key_gradient_kernel``: ``rows`` queries a step, ``keys`` owned key rows."""
    table = FLOAT32["key_gradient"] if float32 else KEY_GRADIENT[family(capability)]
    return _entry(table, head_dim, 16)


class SlotTile(NamedTuple):
    """Sizes of ``slot_rows_kernel``: columns, heads and slots a step, warps, stages."""

    columns: int
    heads: int
    slots: int
    warps: int
    stages: int


def slot_rows_tile(capability: int, group: int, head_dim: int, element: int) -> SlotTile:
    """Tile of ``slot_rows_kernel`` for inputs of ``element`` bytes."""
    if element == 4:
        return SlotTile(64, 16, 16, 4, 1)
    narrow = family(capability) in ("163 KB", "99 KB")
    heads = next(size for size in (16, 32, 64, 128) if size >= min(group, 64 if narrow else 128))
    if head_dim <= 128 and group <= heads and not narrow:
        return SlotTile(64 if head_dim <= 64 else 128, heads, 32, 4, 3)
    slots = 32 if family(capability) == "hopper" and heads == 16 else 64
    # A step holds all of a larger group's blocks of heads, so it cannot hold two stages.
    return SlotTile(64 if head_dim <= 64 else 128, heads, slots, 4, 2 if group <= heads else 1)


class WindowTile(NamedTuple):
    """Sizes of ``window_rows_kernel``: columns, heads a step, warps, stages."""

    columns: int
    heads: int
    warps: int
    stages: int


def window_rows_tile(capability: int, group: int, head_dim: int, element: int) -> WindowTile:
    """Tile of ``window_rows_kernel``, chosen like ``slot_rows_tile``."""
    if element == 4:
        return WindowTile(64, 16, 4, 1)
    heads = next(size for size in (16, 32, 64) if size >= min(group, 64))
    stages = 2 if family(capability) in ("163 KB", "99 KB") else 3
    if family(capability) == "hopper" and heads == 16 and head_dim > 256:
        return WindowTile(256, heads, 4, stages)
    # Where four columns cannot be stored at once, a thread has one column of all 64 heads and an
    # address for each: too many. Of half as many columns it has half the heads.
    apart = heads == 64 and head_dim % 4 != 0 and family(capability) != "hopper"
    return WindowTile(64 if head_dim <= 64 or apart else 128, heads, 4, stages)
