"""The Hopper kernels compile for sm_90 as they must, on any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SHARED_MEMORY = 232448
SPILLS = 1600
"""Bytes spilled, stores and loads: up to 600 with Triton 3.6, 1500 with 3.9, most once an item."""

WINDOW_SPILLS = 600
"""Those of the window-only kernels: up to 64 with Triton 3.6, 424 with 3.9."""


def run_python(*arguments: str) -> str:
    """What a program of its own prints, with this folder's helpers on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (ROOT, ROOT / "backends", HERE.parent / "triton")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
    run = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def compiled(*names: str) -> list[dict[str, Any]]:
    """What ``compile_kernels.py`` says of these calls' kernels."""
    lines = run_python(str(HERE / "compile_kernels.py"), *names).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    return compiled("bf16", "int64", "fp16", "window", "dense")


@pytest.fixture(scope="module")
def ordered() -> list[dict[str, Any]]:
    return compiled("ordered")


@pytest.fixture(scope="module")
def windows() -> list[dict[str, Any]]:
    return compiled("keys-kept", "keys-kept-packed", "keys-kept-fp16")


@pytest.fixture(scope="module")
def narrow() -> list[dict[str, Any]]:
    return compiled("narrow", "narrow-int64", "narrow-fp16", "narrow-pool-only")


def of(kernels: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [kernel for kernel in kernels if kernel["kernel"] == name]


def test_every_call_compiles(kernels: list[dict[str, Any]]) -> None:
    assert len(of(kernels, "forward_kernel")) == 5
    assert len(of(kernels, "backward_kernel")) == 3


def test_they_fit_an_sm(kernels: list[dict[str, Any]], ordered: list[dict[str, Any]]) -> None:
    for kernel in kernels + ordered:
        assert kernel["shared"] <= SHARED_MEMORY
        assert kernel["registers"] <= 128  # 16 warps share 65536
        assert kernel["spills"] <= SPILLS


def test_window_only_kernels_fit_an_sm(windows: list[dict[str, Any]]) -> None:
    assert len(of(windows, "window_forward_kernel")) == 3
    assert len(of(windows, "window_backward_kernel")) == 2
    assert len(of(windows, "window_key_gradient_kernel")) == 1
    for kernel in windows:
        assert kernel["shared"] <= SHARED_MEMORY
        # Of both halves' keys, or a step's operands: wgmma must see them.
        assert kernel["fences"] == (1 if "key" in kernel["kernel"] else 2)
        # 12 warps share 65536, or 8.
        assert kernel["registers"] <= (255 if "key" in kernel["kernel"] else 168)
        assert kernel["spills"] <= WINDOW_SPILLS
        assert kernel["atomics"] == 0


def test_window_only_kernels_load_and_store_16_bytes_at_a_time(
    windows: list[dict[str, Any]],
) -> None:
    for kernel in of(windows, "window_forward_kernel"):
        assert kernel["wide_copies"] == kernel["copies"] == 2 * 8 * 4  # the query of two tiles
        assert kernel["wide_loads"] == 2 * 40  # the keys
        assert kernel["wide_stores"] == 2 * 8  # two column pieces
    for kernel in of(windows, "window_backward_kernel"):
        assert kernel["wide_copies"] == kernel["copies"] == 2 * 2 * 8 * 4
        assert kernel["wide_loads"] == 2 * 40
        assert kernel["wide_stores"] in (16, 16 + 32)  # P and dS, for the keys
    (kernel,) = of(windows, "window_key_gradient_kernel")
    assert kernel["wide_copies"] == kernel["copies"] - 4  # those of 16 keys, 8 bytes a thread


def test_two_narrow_programs_fit_an_sm(narrow: list[dict[str, Any]]) -> None:
    assert len(of(narrow, "forward_kernel")) == 4
    assert len(of(narrow, "backward_kernel")) == 3
    for kernel in narrow:
        assert kernel["shared"] + 1024 <= 233472 // 2
        assert kernel["registers"] <= 255  # 4 warps each
        assert kernel["spills"] <= SPILLS


def test_matrix_products_are_asynchronous_wgmma(
    kernels: list[dict[str, Any]],
    ordered: list[dict[str, Any]],
    narrow: list[dict[str, Any]],
    windows: list[dict[str, Any]],
) -> None:
    for kernel in kernels + ordered + narrow + windows:
        assert kernel["wgmma"] > 0
        assert kernel["mma"] == 0
        assert not kernel["serialized"]


def test_rows_are_copied_16_bytes_at_a_time(
    kernels: list[dict[str, Any]], narrow: list[dict[str, Any]]
) -> None:
    for kernel in kernels + narrow:
        assert kernel["copies"] > 0
        assert kernel["wide_copies"] == kernel["copies"]


def test_gradients_are_added_16_bytes_at_a_time(
    kernels: list[dict[str, Any]], narrow: list[dict[str, Any]]
) -> None:
    for kernel in of(kernels, "backward_kernel"):
        assert kernel["vector_atomics"] == kernel["atomics"] == 64
    for kernel in of(narrow, "backward_kernel"):
        assert kernel["vector_atomics"] == kernel["atomics"] == 16


def test_an_ordered_backward_adds_nothing_atomically(ordered: list[dict[str, Any]]) -> None:
    found = of(ordered, "backward_kernel")  # one for each chunk of tokens, all the same
    assert found
    assert all(kernel["atomics"] == 0 for kernel in found)


def test_block_counts_are_carried_from_item_to_item(
    kernels: list[dict[str, Any]], narrow: list[dict[str, Any]]
) -> None:
    for kernel in of(kernels, "forward_kernel"):
        assert kernel["carries"] == [3, 3, 3, 3]  # block, item and block count in each role
    for kernel in of(kernels, "backward_kernel"):
        assert kernel["carries"] == [2, 2, 2, 2]  # block and item
    for kernel in narrow:
        assert kernel["carries"] == [3]  # block count, block and item


def test_warming_up_compiles_the_kernels_that_will_run() -> None:
    program = (
        "from cross_compile import CompileOnlyDriver\n"
        "from csa_backend_triton.compiling import compile_spec\n"
        "from csa_dispatch import CallSpec\n"
        "from triton.runtime.driver import driver\n"
        "driver.set_active(CompileOnlyDriver(90))\n"
        "spec = CallSpec(capability=90)\n"
        "for portable in (False, True):\n"
        "    print([name for name, *_ in compile_spec(spec, portable=portable).kernels])\n"
    )
    chosen, portable = run_python("-c", program).splitlines()
    assert chosen == "['plan_kernel', 'forward_kernel']"
    assert portable == "['forward_kernel']"
