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
from csa_backend_triton.compiling import compile_spec
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver

from csa_dispatch.call import Kind
from csa_dispatch.call_spec import CallSpec

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


BASE = CallSpec(needs_grad=(True, True, True, True))


def _calls() -> dict[str, CallSpec]:
    calls: dict[str, CallSpec] = {}
    for size in (64, 128, 256, 320, 512, 576):
        base = BASE._replace(head_dim=size)
        dense = base._replace(kind=Kind.DENSE, compress_ratio=4)
        for heads in (16, 32, 64):
            calls[f"gather-{size}-{heads}"] = base._replace(heads=heads)
        calls[f"gather-{size}-fp32"] = base._replace(heads=16, dtype="float32")
        calls[f"gather-{size}-fp16"] = base._replace(dtype="float16")
        calls[f"dense-{size}"] = dense
        calls[f"dense-{size}-fp32"] = dense._replace(heads=16, dtype="float32")
        calls[f"dense-{size}-own-kv"] = dense._replace(heads=16, kv_heads=16)
        calls[f"window-{size}"] = base._replace(kind=Kind.WINDOW)
        calls[f"deterministic-{size}"] = base._replace(deterministic=True)
    for size in (192, 384):
        for heads in (16, 32, 64):
            calls[f"gather-{size}-{heads}"] = BASE._replace(head_dim=size, heads=heads)
        dense = BASE._replace(head_dim=size, heads=16, kind=Kind.DENSE, compress_ratio=4)
        calls[f"dense-{size}-16"] = dense
    # Head dimensions that need masks and are no multiple of 16: rows are read element by element.
    # Where they are multiples of 4 they are still written several columns at once.
    for size in (40, 100, 150, 200, 257, 264, 350, 500, 570):
        base = BASE._replace(head_dim=size)
        for heads in (16, 32, 64):
            calls[f"gather-{size}-{heads}"] = base._replace(heads=heads)
        for heads in (16, 64):
            dense = base._replace(heads=heads, kind=Kind.DENSE, compress_ratio=4)
            calls[f"dense-{size}-{heads}"] = dense
            calls[f"window-{size}-{heads}"] = base._replace(heads=heads, kind=Kind.WINDOW)
    for size in (500, 570):
        calls[f"gather-{size}-128"] = BASE._replace(head_dim=size, heads=128)
    calls["packed"] = BASE._replace(documents="cu_seqlens")
    calls["packed-dense"] = calls["dense-512"]._replace(documents="cu_seqlens")
    calls["heads-128"] = BASE._replace(heads=128)
    calls["heads-256"] = BASE._replace(heads=256, head_dim=128)
    calls["heads-odd"] = BASE._replace(heads=31)
    calls["head-dim-odd"] = BASE._replace(heads=8, head_dim=80)
    return calls


CALLS = _calls()


class Compiled(NamedTuple):
    """What one compiled kernel uses. Sizes in bytes; spills counts both directions."""

    call: str
    kernel: str
    constants: dict[str, Any]
    shared: int
    shared_limit: int
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
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        log = subprocess.run(
            [
                get_ptxas(capability).path,
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
    session = compile_spec(CALLS[name]._replace(capability=capability), portable=True)
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
            SHARED_LIMIT[capability],
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
