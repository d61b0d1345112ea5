"""The tiles of the tables that no call of ``cross_compile`` launches, one a line.

Run as a program, as ``workspace.py`` is: it runs the real launch code on meta tensors and
neither compiles nor starts anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from cross_compile import CALLS, CompileOnlyDriver
from csa_backend_triton import launching, tile_table
from csa_backend_triton.compiling import compile_spec
from csa_backend_triton.tile_table import FLOAT32, TABLES, Table, Tile, family, head_dim_class
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 86, 90, 100)
"""One of each family."""


def reached(capability: int) -> set[tuple[int, int, int]]:
    """Table (its id), head dimension class and rows of every entry that is looked up."""
    found: set[tuple[int, int, int]] = set()
    entry = tile_table._entry

    def noted(table: Table, head_dim: int, rows: int) -> Tile:
        tile = entry(table, head_dim, rows)
        found.add((id(table), head_dim_class(table, head_dim), tile.rows))
        return tile

    tile_table._entry = noted
    driver.set_active(CompileOnlyDriver(capability))
    for spec in CALLS.values():
        compile_spec(spec._replace(capability=capability), portable=True)
    tile_table._entry = entry
    return found


def tables(capability: int) -> Iterator[tuple[str, Table]]:
    """The tables of a capability's family, by name."""
    for name, by_family in TABLES.items():
        if family(capability) in by_family:
            yield name, by_family[family(capability)]
    for name in FLOAT32:
        yield f"fp32 {name}", tile_table._table(name, capability, True)


def main() -> None:
    # Which tiles are looked up is all that counts.
    JITFunction.warmup = lambda *_, **__: None  # type: ignore[method-assign]
    launching.settle_key = lambda _: None
    for capability in CAPABILITIES:
        found = reached(capability)
        for name, table in tables(capability):
            for bound, entries in table.items():
                for rows in entries:
                    if (id(table), bound, rows) not in found:
                        print(f"sm_{capability} {name} {bound} {rows}")
    print("done")


if __name__ == "__main__":
    main()
