"""Check the Hopper kernels against the float64 oracle in ``emulator``.

Run as a program, with TRITON_INTERPRET=1 for the plain kernels, since it stands in for Gluon. It
prints a line for each case that fails, and how many passed.

    python emulate_kernels.py [NUMBER ...]

NUMBER selects cases of ``CASES``. ``emulate_kernels.py spread`` instead prints the rows and first
heads of 2500 rows' items, two head blocks each, in the order in which the backward takes them, and
``emulate_kernels.py taint`` how calls with an Inf in a row of Q or dO compare with ``eager``'s.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.backends.hopper import emulator

emulator.install()

from csa_backend_eager import backend as eager  # noqa: E402
from csa_backend_triton import (  # noqa: E402
    hopper,
    hopper_backward_scatter,
    hopper_backward_store,
    hopper_forward,
    hopper_gradient,
    hopper_narrow_backward,
    hopper_narrow_forward,
    hopper_operands,
    hopper_ordered,
    hopper_tiles,
    hopper_window,
    launching,
)

from csa_dispatch.backend import Backend  # noqa: E402
from csa_dispatch.call import Call, Gradients, Kind, token_bounds  # noqa: E402
from csa_dispatch.call_spec import deterministic_mode  # noqa: E402
from csa_dispatch.testing import Case, backend_run, check_case  # noqa: E402

PROGRAMS = 3
"""Instead of a GPU's: so that a program has many items."""

WIDTH = 512
COLUMNS = torch.arange(64).reshape(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(-1)
"""Of 64 columns, the one kept at each place: at 16 g + 4 q + 2 h + e, 16 g + 8 h + 2 q + e."""


# What follows stands for inline assembly.


def rescaled(acc: Tensor, alpha: Tensor) -> Tensor:
    return acc * alpha[:, None]


def add_rows(tile: Tensor, base: Any, even: Tensor, odd_rows: Tensor, odd: Tensor) -> None:
    """Rows of even keys go where ``even`` says, of odd ones where ``odd_rows`` does."""
    offset = torch.where(odd == 1, odd_rows, even)[:, 0]
    used = offset >= 0
    place = (offset - 16 * odd[:, 0])[:, None] + torch.arange(64)
    place = place + (base.offset // base.unit)[:, :1]
    base.storage.index_put_((place[used],), tile[:, COLUMNS][used], accumulate=True)


def store_rows(tile: Tensor, base: Any, offset: Tensor) -> None:
    place = offset[:, :1] + torch.arange(64) + (base.offset // base.unit)[:, :1]
    base.storage[place] = tile[:, COLUMNS].to(base.storage.dtype)


def row_offsets(own: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
    other = own.reshape(-1, 2).flip(1).reshape(-1)
    return torch.where(odd, other, own), torch.where(odd, own, other)


def launch(kernel: Any, *arguments: Any, **keywords: Any) -> None:
    """Gluon kernels are plain functions here, others are Triton's."""
    is_gluon = isinstance(kernel, type(launch))
    (emulator.launch if is_gluon else launching.launch)(kernel, *arguments, **keywords)


def stand_in() -> None:
    """Have the launchers start kernels here."""
    for module in (hopper_forward, hopper_narrow_forward):
        module.rescaled = rescaled  # type: ignore[attr-defined]
    for module in (hopper_backward_scatter, hopper_narrow_backward):
        module.add_rows = add_rows  # type: ignore[attr-defined]
    hopper_narrow_backward._row_offsets = row_offsets  # type: ignore[attr-defined]
    hopper_backward_store._store_rows = store_rows  # type: ignore[attr-defined]
    for module in (hopper, hopper_gradient, hopper_operands, hopper_ordered, hopper_window):
        module.launch = launch  # type: ignore[attr-defined]
    for module in (hopper_operands, hopper_ordered, hopper_window):
        module.multiprocessors = lambda _: PROGRAMS  # type: ignore[attr-defined]
    # As few as there may be, so that window-only backwards have several chunks.
    hopper_window.CHUNK_BYTES = 0  # type: ignore[misc]
    hopper_window.FEWEST_TOKENS = 1  # type: ignore[misc]
    hopper_window.FEWEST_ROWS = hopper_window.FEWEST_TALL_ROWS = 1  # type: ignore[misc]


class Hopper(Backend):
    """The Hopper kernels alone."""

    name = "hopper"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return hopper.forward(call, token_bounds(call))

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        bounds, ordered = token_bounds(call), deterministic_mode()
        return hopper.backward(call, bounds, output, lse, grad_output, needs, ordered)


BASE = {
    "dtype": "bfloat16",
    "heads": 5,
    "tokens": 12,
    "head_dim": 512,
    "pool": 90,
    "slots": 140,
    "window": 9,
}
DENSE = {"kind": Kind.DENSE, "compress_ratio": 1, "slots": 0}
WINDOW = {"kind": Kind.WINDOW, "tokens": 90}
CASES = [
    {},
    {"content": "random", "tokens": 70, "window": 70, "slots": 3},
    {"content": "nan"},
    {"content": "poisoned", "window": 0},
    {"content": "duplicates", "pool": 3},
    {"content": "scattered", "slots": 300},
    {"heads": 70, "window": 1, "slots": 1},
    {"documents": "cu_seqlens", "tokens": 40, "slots": 20, "sink": "none"},
    {"documents": "doc_ids", "batch": 2, "index_dtype": "int64"},
    {"memory": "strided"},
    {"dtype": "float16", "needs_grad": (False,) * 4},
    {**WINDOW, "window": 130, "tokens": 80},
    {**WINDOW, "window": 0, "sink": "none", "tokens": 12},
    {"needs_grad": (True, False, True, False)},
    {"needs_grad": (False, True, False, True)},
    {**DENSE, "tokens": 90, "content": "nan"},
    {**DENSE, "documents": "cu_seqlens", "tokens": 40},
    {"head_dim": 128},
    {"head_dim": 128, "content": "nan", "heads": 70, "tokens": 30},
    {"head_dim": 128, "documents": "cu_seqlens", "tokens": 40, "slots": 20},
    {"head_dim": 128, "needs_grad": (True, False, True, False), "memory": "strided"},
    {"head_dim": 128, "sink": "none", "content": "scattered", "slots": 300},
    {"head_dim": 128, "window": 0, "content": "poisoned", "slots": 1},
    {**WINDOW, "window": 128, "tokens": 300},
    {**WINDOW, "window": 128, "tokens": 180, "content": "nan"},
    {**WINDOW, "window": 70, "documents": "cu_seqlens", "content": "poisoned", "tokens": 150},
    {**WINDOW, "documents": "doc_ids", "batch": 2, "tokens": 50},
    {**WINDOW, "heads": 12, "window": 1, "sink": "same", "tokens": 40},
    {**WINDOW, "dtype": "float16", "needs_grad": (False,) * 4},
    {**WINDOW, "memory": "expanded", "batch": 2, "tokens": 30},
    {**WINDOW, "memory": "strided", "tokens": 3},
    {**WINDOW, "needs_grad": (True, False, False, False), "tokens": 40},
    {**WINDOW, "needs_grad": (False, True, False, True), "tokens": 40},
    {"deterministic": True, "content": "nan"},
    {"deterministic": True, "documents": "doc_ids", "batch": 2, "heads": 70},
    {**WINDOW, "documents": "cu_seqlens"},  # messy: rows without keys
    {**WINDOW, "heads": 51, "tokens": 40},  # split unevenly, the keys' sums in two
    {**WINDOW, "heads": 6, "batch": 3, "tokens": 70, "window": 40},  # a chunk ends within an entry
]


def print_spread() -> None:
    rows = 2500
    walk = hopper_tiles.Walk(None, None, 0, 0, 128, rows, 0, rows, 2 * rows, None, False)
    for item in range(2 * rows):
        print(*map(int, walk.spread(item)))


def print_taints() -> None:
    """Whether results agree, and are finite in the same places, for an Inf in Q or dO.

    Generated cases have such rows only where their token sees no key.
    """
    for head_dim, slots in ((512, 0), (512, 9), (128, 9)):
        for part in ("query", "grad_output"):
            generator = torch.Generator().manual_seed(1)
            draw = partial(torch.randn, generator=generator)
            query, upstream = draw(2, 1, 5, 70, head_dim).bfloat16()
            (query if part == "query" else upstream)[0, 1, 50, 3] = torch.inf
            local = draw(1, 1, 70, head_dim).bfloat16()
            pool = draw(1, 1, 40, head_dim).bfloat16() if slots else None
            picks = torch.randint(-1, 40, (1, 70, slots), generator=generator) if slots else None
            rest = (None, None, None, 20, None, head_dim**-0.5)
            call = Call(query, local, pool, picks, draw(5), *rest)
            needs = (True, True, bool(slots), True)
            found: list[list[Tensor]] = []
            for backend in (Hopper(), eager):
                output, lse = backend.forward(call)
                gradients = backend.backward(call, output, lse, upstream, needs)
                found.append([x for x in (output, lse, *gradients) if x is not None])
            # bf16's rounding of P and dS beside that of the sums: a few percent of small elements.
            same = all(
                x.isfinite().equal(y.isfinite())
                and torch.allclose(*(z.float().nan_to_num(0, 0, 0) for z in (x, y)), 0.05, 0.05)
                for x, y in zip(*found, strict=True)
            )
            tainted = int((~found[0][3].isfinite()).any(-1).sum())
            print(head_dim, slots, part, same, tainted)


def print_columns() -> None:
    """Whether a window-only call has the same bits with neighbouring columns apart in memory."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    query, upstream = draw(2, 1, 5, 70, WIDTH).bfloat16()
    local, sink = draw(1, 1, 70, WIDTH).bfloat16(), draw(5)
    found: list[list[Tensor]] = []
    for apart in (False, True):
        query, local, upstream = (
            x.mT.contiguous().mT if apart else x for x in (query, local, upstream)
        )
        call = Call(query, local, None, None, sink, None, None, None, 20, None, WIDTH**-0.5)
        output, lse = Hopper().forward(call)
        gradients = Hopper().backward(call, output, lse, upstream, (True, True, False, True))
        found.append([output, lse, *(x for x in gradients if x is not None)])
    print(*(x.equal(y) for x, y in zip(*found, strict=True)))


def main(numbers: list[str]) -> None:
    torch.set_num_threads(1)
    run, passed = backend_run(Hopper()), 0
    for number in map(int, numbers or range(len(CASES))):
        case = Case(**{**BASE, **CASES[number]})  # type: ignore[arg-type]
        result = check_case(case, run, device="cpu")
        passed += result.status == "pass"
        if result.status != "pass":
            print(number, result.status, f"{result.share:.2f}", result.name, result.message)
    print("passed", passed)


if __name__ == "__main__":
    asked = sys.argv[1:]
    stand_in()
    if asked == ["spread"]:
        print_spread()
    elif asked == ["columns"]:
        print_columns()
    elif asked == ["taint"]:
        print_taints()
    else:
        main(asked)
