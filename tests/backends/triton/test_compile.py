"""Every kernel and every tile of the tables compiles for every architecture, within its means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("cross_compile.py")
UNREACHED = Path(__file__).with_name("unreached_tiles.py")

TENSOR_MEMORY_COLUMNS = 512
OLDEST_TRITON = metadata.version("triton").startswith("3.6.")
SPILL_LIMIT = 2048 if OLDEST_TRITON else 8192
"""Bytes spilled by a kernel, stores and loads together, over its whole text. Wide heads keep a
64-row accumulator in registers and spill addresses around the loops. The tiles were chosen with
Triton 3.6; what later ones spill with the same tiles is only kept from growing."""

PACKED_SPILL_LIMIT = 4608 if OLDEST_TRITON else 8192
"""The same for tiles of several tokens, which hold a block's cleaned keys in registers too."""

UNEVEN_SPILL_LIMIT = 5632 if OLDEST_TRITON else 8192
"""The same but on cards of 99 KB for head dimensions that are no multiple of 16. Rows are read
element by element there, which takes many registers. On an H200 the fastest tiles of 64 heads
spill 3 to 5 KB at 350, 500 and 570 columns, those of 32 heads 2 to 3 KB at 150 and 570."""

UNEVEN_MANY_SPILL_LIMIT = 14336
"""The same for more than 64 heads, which need a mask as well. They have the tiles of 64 heads, and
were not timed."""

REDUCED = {
    80: ("gather-512-64", "gather-264-64"),
    86: ("gather-512-64", "gather-257-64"),
    89: ("gather-576-16",),
    90: (
        "gather-512-64",
        "gather-320-16",
        "gather-570-64",
        "deterministic-128",
        "dense-512",
        "dense-512-own-kv",
        "packed",
    ),
    100: ("gather-512-64", "gather-128-64"),
    103: ("window-512",),
    120: ("dense-128",),
}


def printed(program: Path, *arguments: str) -> list[str]:
    """The lines of a program that compiles, which a process that interprets cannot."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


@lru_cache
def compiled(capability: int, *names: str) -> list[dict[str, Any]]:
    lines = printed(PROGRAM, str(capability), *names)
    return [json.loads(line) for line in lines if line.startswith("{")]


def spill_limit(capability: int, constants: dict[str, Any]) -> int:
    limit = SPILL_LIMIT if constants.get("SINGLE") is not False else PACKED_SPILL_LIMIT
    if capability in (80, 90, 100, 103) and constants.get("D", 0) % 16:
        many = constants.get("GROUP", 0) > 64
        return max(limit, UNEVEN_MANY_SPILL_LIMIT if many else UNEVEN_SPILL_LIMIT)
    return limit


def check(capability: int, kernels: list[dict[str, Any]]) -> None:
    assert kernels
    faults = []
    for kernel in kernels:
        title = f"sm_{capability} {kernel['call']} {kernel['kernel']}"
        if kernel["shared"] > kernel["shared_limit"]:
            faults.append(f"{title}: {kernel['shared']} B of shared memory")
        if kernel["tensor_memory"] > TENSOR_MEMORY_COLUMNS:
            faults.append(f"{title}: {kernel['tensor_memory']} columns of tensor memory")
        if kernel["spills"] > spill_limit(capability, kernel["constants"]):
            faults.append(f"{title}: spills {kernel['spills']} B")
        by_keys = kernel["kernel"] == "key_gradient_kernel"
        rows = kernel["constants"].get("KEYS" if by_keys else "ROWS", 0)
        tensor_cores = "fp32" not in kernel["call"]
        if rows >= 64 and tensor_cores:
            if capability == 90 and not kernel["wgmma"]:
                faults.append(f"{title}: {rows} rows without wgmma")
            if capability in (100, 103) and not kernel["tcgen05"]:
                faults.append(f"{title}: {rows} rows without tcgen05")
        scatters = kernel["constants"].get("ATOMIC", False)
        on_16_bytes = kernel["constants"].get("D", 0) % 4 == 0  # where rows of fp32 begin
        if scatters and on_16_bytes and capability >= 90 and not kernel["vector_atomics"]:
            faults.append(f"{title}: scalar atomics")
        if not scatters and kernel["atomics"]:
            faults.append(f"{title}: atomics where none are meant")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("capability", sorted(REDUCED))
def test_the_main_kernels_compile_within_their_means(capability: int) -> None:
    check(capability, compiled(capability, *REDUCED[capability]))


def test_every_tile_is_among_what_compiles() -> None:
    assert printed(UNREACHED) == ["done"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", sorted(REDUCED))
def test_every_tile_compiles_within_its_means(capability: int) -> None:
    check(capability, compiled(capability))
