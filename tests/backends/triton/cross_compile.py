"""Compile the portable kernels for any NVIDIA architecture on a machine without a GPU.

Run as a program (Triton cannot interpret and compile in one process): it runs the real launch
code on meta tensors under a driver that answers only what compiling asks, and prints one JSON
line for each compiled kernel.

    python cross_compile.py CAPABILITY [NAME ...]

NAME selects calls of ``CALLS``; none means all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from csa_backend_triton.launching import compile_only
from csa_backend_triton.portable_backward import backward
from csa_backend_triton.portable_forward import forward
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from csa_dispatch.call import Call, token_bounds

SHARED_LIMIT = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}
"""Shared memory one block of threads may use, by capability, in bytes."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompileOnlyDriver:
    """What Triton's compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # a key of Triton's kernel cache

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    class utils:  # noqa: N801
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": SHARED_LIMIT[device],
                "multiprocessor_count": 132,
                "warpSize": 32,
                "max_num_regs": 65536,
            }


class Shape(NamedTuple):
    """One call to compile: forward and backward with all gradients."""

    kind: str = "gather"
    heads: int = 64
    kv_heads: int = 1
    head_dim: int = 512
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    deterministic: bool = False

    def call(self) -> Call:
        """The call, on meta tensors."""
        tokens, pool = 4096, 1024
        dense, window = self.kind == "dense", self.kind == "window"

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        offsets = empty(5, dtype=torch.int32) if self.packed else None
        return Call(
            empty(1, self.heads, tokens, self.head_dim),
            empty(1, self.kv_heads, tokens, self.head_dim),
            None if window else empty(1, self.kv_heads, pool, self.head_dim),
            None if dense or window else empty(1, tokens, 512, dtype=torch.int32),
            empty(self.heads, dtype=torch.float32),
            offsets,
            None if window else offsets,
            None,
            128,
            4 if dense else None,
            self.head_dim**-0.5,
        )


def _calls() -> dict[str, Shape]:
    calls: dict[str, Shape] = {}
    for head_dim in (64, 128, 256, 512, 576):
        for heads in (16, 32, 64):
            calls[f"gather-{head_dim}-{heads}"] = Shape("gather", heads, 1, head_dim)
        calls[f"gather-{head_dim}-fp32"] = Shape("gather", 16, 1, head_dim, torch.float32)
        calls[f"gather-{head_dim}-fp16"] = Shape("gather", 64, 1, head_dim, torch.float16)
        calls[f"dense-{head_dim}"] = Shape("dense", 64, 1, head_dim)
        calls[f"dense-{head_dim}-own-kv"] = Shape("dense", 16, 16, head_dim)
        calls[f"window-{head_dim}"] = Shape("window", 64, 1, head_dim)
        calls[f"deterministic-{head_dim}"] = Shape("gather", 64, 1, head_dim, deterministic=True)
    calls["packed"] = Shape("gather", 64, 1, 512, packed=True)
    calls["packed-dense"] = Shape("dense", 64, 1, 512, packed=True)
    calls["heads-128"] = Shape("gather", 128)
    calls["heads-odd"] = Shape("gather", 31)
    calls["head-dim-odd"] = Shape("gather", 8, 1, 80)
    return calls


CALLS = _calls()


class Compiled(NamedTuple):
    """What one compiled kernel uses. Sizes in bytes; spills counts both directions."""

    call: str
    kernel: str
    constants: dict[str, Any]
    shared: int
    tensor_memory: int
    registers: int
    spills: int
    serialized: bool
    wgmma: int
    tcgen05: int
    mma: int
    vector_atomics: int
    atomics: int


def assemble(ptx: str, capability: int) -> tuple[int, int, bool]:
    """Registers, spilled bytes, and whether ptxas serialised the wgmma instructions."""
    suffix = "a" if capability >= 90 else ""
    newer = TOOLS / "ptxas-blackwell"
    ptxas = newer if capability >= 100 and newer.exists() else TOOLS / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        log = subprocess.run(
            [
                ptxas,
                "-v",
                f"-arch=sm_{capability}{suffix}",
                source,
                "-o",
                f"{folder}/kernel.cubin",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    return (
        max(map(int, registers)),
        sum(int(one) + int(other) for one, other in spills),
        "serializ" in log,
    )


def compile_call(name: str, capability: int) -> Iterator[Compiled]:
    """Compile what forward and backward of a call launch."""
    shape = CALLS[name]
    call = shape.call()
    bounds = token_bounds(call)
    with compile_only(capability) as session:
        output, lse = forward(call, bounds)
        backward(call, bounds, output, lse, output, (True,) * 4, shape.deterministic)
    seen: set[str] = set()
    for kernel, constants, compiled in session.kernels:
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        ptx = compiled.asm["ptx"]
        registers, spills, serialized = assemble(ptx, capability)
        yield Compiled(
            name,
            kernel,
            constants,
            compiled.metadata.shared,
            getattr(compiled.metadata, "tmem_size", 0) or 0,
            registers,
            spills,
            serialized,
            len(re.findall(r"wgmma\.mma_async", ptx)),
            len(re.findall(r"tcgen05\.mma", ptx)),
            len(re.findall(r"\bmma\.sync", ptx)),
            len(re.findall(r"\b(?:atom|red)\.global[\w.]*\.v4\.f32", ptx)),
            len(re.findall(r"\b(?:atom|red)\.global", ptx)),
        )


def main(arguments: list[str]) -> None:
    capability = int(arguments[0])
    driver.set_active(CompileOnlyDriver(capability))
    for name in arguments[1:] or CALLS:
        for compiled in compile_call(name, capability):
            print(json.dumps(compiled._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
