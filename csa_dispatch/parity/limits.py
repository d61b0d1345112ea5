"""Limits: the cells that a backend would take too long over, left out and counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from csa_dispatch.policy import Entry

from .matrix import Limit
from .results import Cell

Sizes = Sequence[tuple[int, int]]
"""Of each call: query rows (batch times tokens) and heads."""


class Ledger:
    """Applies a matrix's limits and remembers what they cost."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._limits = {name: limit for name, limit in limits.items() if _in_force(limit)}
        self._left_out: dict[str, int] = {}

    def keep(self, cells: Sequence[Cell], sizes: Callable[[], Sizes]) -> tuple[Cell, ...]:
        """The cells within the limits; ``sizes`` is asked only where a limit is in force."""
        kept = []
        for cell in cells:
            over = [name for name in self._limited(cell.entry) if self._over(name, sizes())]
            for name in over:
                self._left_out[name] = self._left_out.get(name, 0) + 1
            if not over:
                kept.append(cell)
        return tuple(kept)

    def _limited(self, entry: Entry) -> list[str]:
        return [name for name in dict.fromkeys(entry) if name in self._limits]

    def _over(self, name: str, sizes: Sizes) -> bool:
        limit = self._limits[name]
        blocks = sum(rows * -(-heads // limit.heads_a_block) for rows, heads in sizes)
        return blocks > limit.max_blocks

    def notes(self) -> list[str]:
        """What was left out and why, a sentence a backend."""
        return [
            f"{name}: {number} cells of more than {self._limits[name].max_blocks} blocks left out"
            f" ({self._limits[name].why or 'limit of the matrix'})"
            for name, number in self._left_out.items()
        ]


def _in_force(limit: Limit) -> bool:
    name, _, value = limit.environment.partition("=")
    return not name or os.environ.get(name) == value
