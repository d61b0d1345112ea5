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
keeps an address and a mask for each element. Such reads cannot run ahead, so a second stage gains
nothing. Where the addresses are too many for a thread ptxas may give up: it then takes 32
registers and spills tens of kilobytes.
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


FORWARD: dict[str, Table] = {
    "hopper": {
        63: {16: (32, 4, 1), 64: (32, 4, 1)},
        64: {16: (128, 4, 2), 32: (128, 4, 2, 128), 64: (128, 4, 2, 128)},
        127: {16: (32, 4, 1), 64: (32, 4, 1)},
        # Three programs a multiprocessor instead of two: the cap is worth a third at 64 rows.
        128: {16: (128, 4, 2), 32: (128, 4, 2, 128), 64: (64, 4, 2, 168)},
        255: {16: (32, 4, 1), 64: (32, 4, 1)},
        256: {16: (64, 4, 2), 32: (64, 4, 2, 168), 64: (64, 4, 2)},
        319: {16: (32, 4, 1), 32: (32, 4, 1), 64: (64, 8, 1)},
        320: {16: (64, 4, 2), 32: (64, 4, 2, 168), 64: (64, 8, 2)},
        383: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 8, 1)},
        384: {16: (64, 4, 2, 168), 32: (64, 4, 2), 64: (64, 8, 2)},
        511: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 8, 1)},
        512: {16: (32, 4, 2, 128), 32: (64, 4, 2), 64: (64, 8, 2)},
        575: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 8, 1)},
        576: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 8, 2)},
    },
    "blackwell": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        256: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 2)},
        320: {16: (64, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
        511: {16: (32, 4, 1), 32: (32, 8, 2), 64: (32, 8, 2)},
        512: {16: (64, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
        576: {16: (32, 4, 2), 32: (32, 8, 2), 64: (32, 8, 2)},
    },
    "163 KB": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        255: {16: (64, 4, 2), 32: (64, 4, 2), 64: (32, 4, 2)},
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

# Of tiles that hold several tokens' heads. Families without a table take the ones above.
PACKED_FORWARD: dict[str, Table] = {
    "hopper": {
        63: {64: (64, 4, 1)},
        64: {64: (64, 4, 2, 168)},
        127: {64: (64, 4, 1)},
        128: {64: (64, 4, 2, 168)},
        191: {64: (32, 4, 1)},
        192: {64: (32, 4, 3, 168)},
        255: {64: (32, 4, 1)},
        256: {128: (32, 8, 3)},
        319: {64: (32, 8, 1)},
        320: {64: (64, 8, 3)},
        383: {64: (32, 8, 1)},
        384: {64: (64, 8, 3)},
        511: {64: (32, 8, 1)},
        512: {64: (32, 8, 3)},
        575: {64: (32, 8, 1)},
        576: {64: (32, 8, 3)},
    },
}

TOKEN_GRADIENT: dict[str, Table] = {
    "hopper": {
        63: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 4, 1)},
        64: {16: (128, 4, 2), 32: (64, 4, 2, 128), 64: (64, 4, 1, 128)},
        127: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 4, 1)},
        # As in the forward; (64, 4, 2) without a cap is the measured alternative at 64 rows.
        128: {16: (128, 4, 2, 128), 32: (128, 4, 2, 168), 64: (32, 4, 2, 168)},
        191: {16: (64, 4, 1), 32: (64, 4, 1), 64: (64, 8, 1)},
        255: {16: (64, 4, 1), 32: (64, 4, 1), 64: (32, 4, 1)},
        256: {16: (64, 4, 2, 128), 32: (64, 4, 2, 168), 64: (32, 4, 1)},
        383: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 8, 1)},
        384: {16: (64, 4, 2, 168), 32: (64, 4, 2), 64: (64, 8, 1)},
        511: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 8, 1)},
        512: {16: (32, 4, 2, 168), 32: (32, 4, 2), 64: (64, 8, 1)},
        575: {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 8, 1)},
        576: {16: (32, 4, 2, 168), 32: (32, 4, 2), 64: (64, 8, 1)},
    },
    "blackwell": {
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        128: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2)},
        256: {16: (32, 4, 2), 32: (32, 4, 2), 64: (64, 8, 2)},
        512: {16: (32, 4, 2), 32: (32, 8, 2), 64: (32, 8, 1)},
        576: {16: (32, 4, 2), 32: (16, 8, 2), 64: (16, 8, 1)},
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
# Here ``rows`` are the queries a step and ``keys`` the key rows a program owns.
KEY_GRADIENT: dict[str, Table] = {
    "hopper": {
        63: {64: (64, 4, 1)},
        64: {64: (64, 4, 2)},
        127: {64: (64, 4, 1)},
        128: {64: (64, 4, 2)},
        255: {64: (64, 8, 1)},
        256: {64: (32, 4, 2)},
        383: {32: (32, 8, 1)},
        384: {64: (32, 8, 2)},
        511: {32: (32, 8, 1)},
        512: {64: (32, 8, 1)},
        575: {32: (32, 8, 1)},
        576: {32: (32, 8, 2)},
    },
    "blackwell": {
        64: {64: (64, 4, 2)},
        128: {64: (64, 4, 2)},
        256: {64: (64, 8, 1)},
        # ptxas gives up on 64 queries of such head dimensions.
        511: {32: (32, 8, 1)},
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

TABLES = {
    "forward": FORWARD,
    "packed_forward": PACKED_FORWARD,
    "token_gradient": TOKEN_GRADIENT,
    "key_gradient": KEY_GRADIENT,
}
"""By the kernel they are for, less its ``_kernel``. fp32 has tables of its own, which the tuner
leaves alone."""


def take_tables(tables: dict[str, dict[str, Table]]) -> None:
    """Put the entries of another process's ``TABLES`` in force."""
    for name, by_family in tables.items():
        TABLES[name].update(by_family)


# fp32 has no tensor-core form within its error budget: every product is fused multiply-adds.
FLOAT32: dict[str, dict[str, Table]] = {
    "forward": {
        "hopper": {
            128: {16: (32, 4, 1), 32: (32, 4, 1)},
            256: {16: (32, 4, 1)},
            576: {16: (16, 4, 1)},
        },
        "others": {
            128: {16: (32, 4, 1), 32: (32, 4, 1)},
            256: {16: (32, 4, 1)},
            576: {16: (16, 8, 1)},
        },
    },
    "token_gradient": {
        "hopper": {
            128: {16: (32, 4, 1)},
            576: {16: (16, 4, 1)},
        },
        "others": {
            128: {16: (32, 4, 1)},
            256: {16: (16, 4, 1)},
            576: {8: (16, 4, 1)},
        },
    },
    "key_gradient": {
        "hopper": {
            128: {16: (32, 4, 1)},
            256: {16: (16, 4, 1)},
            384: {16: (16, 8, 1)},
            576: {32: (16, 8, 1)},
        },
        # With fewer warps it spills 4 KB on SM86 and 89.
        "99 KB": {
            128: {16: (32, 4, 1)},
            256: {16: (16, 8, 1)},
            512: {16: (8, 4, 1)},
            576: {16: (8, 16, 1)},
        },
        "others": {
            128: {16: (32, 4, 1)},
            256: {16: (16, 4, 1)},
            576: {16: (8, 4, 1)},
        },
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


def _table(name: str, capability: int, float32: bool) -> Table:
    if float32:
        return FLOAT32[name].get(family(capability), FLOAT32[name]["others"])
    return TABLES[name][family(capability)]


def forward_table(capability: int, packed: bool) -> str:
    """The name in ``TABLES`` of the forward's table; ``packed`` if tiles hold several tokens."""
    return "packed_forward" if packed and family(capability) in PACKED_FORWARD else "forward"


def forward_tile(
    capability: int, head_dim: int, rows: int, float32: bool, packed: bool = False
) -> Tile:
    """Tile of ``forward_kernel`` for up to ``rows`` useful rows (heads, or heads and tokens)."""
    name = "forward" if float32 else forward_table(capability, packed)
    return _entry(_table(name, capability, float32), head_dim, rows)


def token_gradient_tile(capability: int, head_dim: int, rows: int, float32: bool) -> Tile:
    """Tile of ``token_gradient_kernel``, chosen like the forward's."""
    return _entry(_table("token_gradient", capability, float32), head_dim, rows)


def key_gradient_tile(capability: int, head_dim: int, float32: bool) -> Tile:
    """Tile of ``key_gradient_kernel``: ``rows`` queries a step, ``keys`` owned key rows."""
    return _entry(_table("key_gradient", capability, float32), head_dim, 16)


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
    cards = family(capability)
    most = 64 if cards in ("163 KB", "99 KB") else 128
    heads = next(size for size in (16, 32, 64, 128) if size >= min(group, most))
    if head_dim <= 128 and group <= heads and cards == "blackwell":
        return SlotTile(64 if head_dim <= 64 else 128, heads, 32, 4, 3)
    slots, stages = 64, 2
    if cards == "hopper" and (heads == 16 or (heads == 32 and head_dim <= 128)):
        slots = 32
    # A step holds all of a larger group's blocks of heads, so it cannot hold two stages. Nor
    # does Hopper gain by the second one where it leaves room for fewer programs.
    if group > heads or (cards == "hopper" and heads >= 64):
        stages = 1
    # Where four columns cannot be added at once, each has an address of its own.
    columns = 64 if head_dim <= 64 or head_dim % 4 != 0 else 128
    return SlotTile(columns, heads, slots, 4, stages)


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
    # Where four columns cannot be stored at once, a thread has one column of all 64 heads and an
    # address for each: too many. Of half as many columns it has half the heads.
    columns = 64 if head_dim <= 64 or (heads == 64 and head_dim % 4 != 0) else 128
    stages = 2 if family(capability) in ("163 KB", "99 KB") else 3
    if family(capability) == "hopper":
        if head_dim > 512:
            columns = 64
        elif head_dim > 256 and heads < 64:
            columns = 256
        if head_dim % 16 != 0 and heads < 64:
            stages = 1
    return WindowTile(columns, heads, 4, stages)
