"""Compile what the Hopper kernels' launch code launches, for sm_90, without a GPU.

Run as a program, since wrong Gluon can abort the process, with ``tests/backends/triton`` on the
path. It prints one JSON line for each kernel.

    python compile_kernels.py NAME ...

NAME selects calls of ``CALLS``.
"""

from __future__ import annotations

import json
import re
import sys
from typing import NamedTuple

import torch
from cross_compile import CompileOnlyDriver, assemble
from csa_backend_triton import hopper
from csa_backend_triton.launching import compile_only
from triton.runtime.driver import driver

from csa_dispatch.call import Call, token_bounds

TOKENS, POOL = 4096, 1024


class Shape(NamedTuple):
    """One call to compile; ``gradients`` None for the forward alone, ``ratio`` for dense calls."""

    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    sink_dtype: torch.dtype | None = torch.float32
    heads: int = 64
    head_dim: int = 512
    slots: int = 512
    window: int = 128
    ratio: int | None = None
    packed: bool = False
    gradients: tuple[bool, bool, bool, bool] | None = None
    deterministic: bool = False

    def call(self) -> Call:
        """The call, on meta tensors."""

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        offsets = empty(5, dtype=torch.int32) if self.packed else None
        pool = empty(1, 1, POOL, self.head_dim) if self.slots or self.ratio else None
        return Call(
            empty(1, self.heads, TOKENS, self.head_dim),
            empty(1, 1, TOKENS, self.head_dim),
            pool,
            empty(1, TOKENS, self.slots, dtype=self.index_dtype) if self.slots else None,
            None if self.sink_dtype is None else empty(self.heads, dtype=self.sink_dtype),
            offsets,
            None if pool is None else offsets,
            None,
            self.window,
            self.ratio,
            self.head_dim**-0.5,
        )


CALLS = {
    "bf16": Shape(gradients=(True, True, True, True)),
    "int64": Shape(index_dtype=torch.int64, packed=True, gradients=(True, True, True, True)),
    "fp16": Shape(torch.float16, torch.int64, sink_dtype=None),
    "window": Shape(sink_dtype=torch.bfloat16, slots=0, window=200),
    "keys-kept": Shape(heads=16, slots=0, gradients=(True, True, True, True)),
    "keys-kept-packed": Shape(
        heads=16, slots=0, packed=True, gradients=(True, False, False, False)
    ),
    "keys-kept-fp16": Shape(torch.float16, sink_dtype=None, heads=16, slots=0),
    "dense": Shape(slots=0, ratio=128, gradients=(True, True, True, True)),
    "ordered": Shape(gradients=(True, True, True, True), deterministic=True),
    "pool-only": Shape(gradients=(False, False, True, False)),
    "narrow": Shape(head_dim=128, gradients=(True, True, True, True)),
    "narrow-int64": Shape(
        index_dtype=torch.int64, head_dim=128, packed=True, gradients=(True, True, True, True)
    ),
    "narrow-fp16": Shape(torch.float16, torch.int64, sink_dtype=None, head_dim=128),
    "narrow-pool-only": Shape(head_dim=128, gradients=(False, False, True, False)),
}


KERNELS = (
    "forward_kernel",
    "backward_kernel",
    "window_forward_kernel",
    "window_backward_kernel",
    "window_key_gradient_kernel",
)


def item_loop_carries(ttgir: str) -> list[int]:
    """How many scalars each loop over items carries, in order.

    Triton 3.6.0 drops a carried scalar whose one use is to bound an inner loop; every later
    item would then repeat the first one's block count.
    """
    # The loops over items are those that carry scalars alone or whose bound still has its name.
    loops = re.findall(r"scf\.for .* to (\S+) .*-> \((.*)\)", ttgir)
    return [
        len(re.findall(r"\bi32\b", types))
        for bound, types in loops
        if bound == "%items" or set(types.split(", ")) == {"i32"}
    ]


def main(names: list[str]) -> None:
    driver.set_active(CompileOnlyDriver(90))
    for name in names:
        shape = CALLS[name]
        call = shape.call()
        bounds = token_bounds(call)
        with compile_only(90) as session:
            output, lse = hopper.forward(call, bounds)
            if shape.gradients is not None:
                needs, deterministic = shape.gradients, shape.deterministic
                hopper.backward(call, bounds, output, lse, output, needs, deterministic)
        for kernel, _, compiled in session.kernels:
            if kernel not in KERNELS:
                continue
            ptx = compiled.asm["ptx"]
            registers, spills, serialized = assemble(ptx, 90)
            found = {
                "kernel": kernel,
                "shared": compiled.metadata.shared,
                "registers": registers,
                "spills": spills,
                "serialized": serialized,
                "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
                "mma": len(re.findall(r"\bmma\.sync", ptx)),
                "fences": len(re.findall(r"\bfence\.proxy\.async", ptx)),
                "copies": len(re.findall(r"cp\.async\.c[ag]\.shared", ptx)),
                "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global.*, 0x10,", ptx)),
                "wide_loads": len(re.findall(r"\bld\.global[\w.]*v4\.b32", ptx)),
                "wide_stores": len(re.findall(r"\bst\.global[\w.]*v4\.b32", ptx)),
                "vector_atomics": len(re.findall(r"\bred\.[\w.:]*v4\.f32", ptx)),
                "atomics": len(re.findall(r"\b(?:atom|red)\.(?!async)[\w.:]*f32", ptx)),
                "carries": item_loop_carries(compiled.asm["ttgir"]),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
