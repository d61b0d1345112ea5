"""Drive the adapter over the real flash-attn-4 until its kernels are machine code; no GPU needed.

Run as a program, a process per architecture (flash-attn-4 reads the target on import):

    python lowering.py sm_100a [CALL ...]

It prints one JSON line for each call of ``CALLS`` (all of them by default): the kernels compiled
for it that no earlier call had compiled, and the shapes and dtypes of what came back. The name
"operands" stands for our own Triton kernel.

Fake tensors stand for the data. Under them flash-attn-4 compiles for CUTE_DSL_ARCH and launches
nothing. A CPU build of torch has no guard for CUDA devices and lends fake CUDA tensors that of
the meta device.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ARCHES = ("sm_100a", "sm_103a")
MULTIPROCESSORS = 148
"""Of a B200 or B300. Up to 64 heads, calls of at most half as many tokens run two blocks each."""


def choose_target(arch: str) -> None:
    """Fix what flash-attn-4 compiles for; only before it is imported."""
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_DUMP_DIR=tempfile.mkdtemp(),
        FLASH_ATTENTION_ARCH=arch.rstrip("a"),
        FLASH_ATTENTION_NUM_SMS=str(MULTIPROCESSORS),
    )


def lend_device_guard() -> None:
    """Let fake CUDA tensors live in a torch without CUDA."""
    import torch

    if torch.backends.cuda.is_built():
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # of c10::DeviceType
    if not registry[cuda]:
        registry[cuda] = registry[meta]


class Shape(NamedTuple):
    """One call, forward and backward with all gradients; V4-Flash's sizes by default."""

    heads: int = 64
    tokens: int = 1024
    kind: str = "gather"
    documents: str = "none"
    dtype: str = "bfloat16"
    batch: int = 1
    recompute_p: bool = True


CALLS: dict[str, Shape] = {
    **{f"{heads} heads": Shape(heads) for heads in (1, 8, 64, 96, 128)},
    **{f"{heads} heads, few tokens": Shape(heads, 8) for heads in (1, 8, 64, 96, 128)},
    **{f"{heads} heads, packed": Shape(heads, documents="cu_seqlens") for heads in (8, 128)},
    "doc_ids": Shape(documents="doc_ids", batch=2),
    "window": Shape(kind="window"),
    "dense": Shape(kind="dense-compressed"),
    "float16": Shape(dtype="float16"),
    "probabilities kept": Shape(recompute_p=False),
}


class Kernel(NamedTuple):
    """One compiled kernel.

    Attributes:
        name: of the class that generates it.
        target: of its PTX.
        multiprocessor: SM number in its ELF header.
        tensor_core: ``tcgen05.mma`` instructions in its PTX.
        seconds: CPU time it took to compile.
    """

    name: str
    target: str
    multiprocessor: int
    tensor_core: int
    seconds: float


def examine(name: str, ptx: str, cubin: bytes, seconds: float) -> Kernel:
    """What a kernel's PTX and machine code say of themselves."""
    assert cubin[:4] == b"\x7fELF"
    (target,) = re.findall(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    flags = int.from_bytes(cubin[48:52], "little")
    tensor_core = ptx.count("tcgen05.mma")
    return Kernel(name, target, flags >> 8 & 0xFF, tensor_core, round(seconds, 1))


class Compilations:
    """Stands in for ``cutlass.cute`` in flash-attn-4's interface and keeps what it compiles."""

    def __init__(self, cute: Any) -> None:
        self._cute = cute
        self.kernels: list[Kernel] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cute, name)

    def compile(self, kernel: Any, *arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        compiled = self._cute.compile(kernel, *arguments, **options)
        seconds = time.process_time() - start
        self.kernels.append(
            examine(type(kernel).__name__, compiled.__ptx__, compiled.__cubin__, seconds)
        )
        return compiled


def make_call(shape: Shape) -> Any:
    """The call, on fake CUDA tensors."""
    import torch

    from csa_dispatch import Call

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="cuda")

    batch, tokens, dtype = shape.batch, shape.tokens, getattr(torch, shape.dtype)
    packed, pooled = shape.documents == "cu_seqlens", shape.kind != "window"
    return Call(
        # As a model has it: token before head in memory.
        empty(batch, tokens, shape.heads, 512, dtype=dtype).transpose(1, 2),
        empty(batch, 1, tokens, 512, dtype=dtype),
        empty(batch, 1, tokens // 4, 512, dtype=dtype) if pooled else None,
        empty(batch, tokens, 512) if shape.kind == "gather" else None,
        empty(shape.heads, dtype=torch.float32),
        empty(4) if packed else None,
        empty(4) if packed and pooled else None,
        empty(batch, tokens) if shape.documents == "doc_ids" else None,
        128,
        4 if shape.kind == "dense-compressed" else None,
        512**-0.5,
    )


def describe(tensor: Any) -> str | None:
    """Dtype, shape and stride order of a result."""
    if tensor is None:
        return None
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def lower(shape: Shape, compilations: Compilations) -> dict[str, Any]:
    """Run forward and backward of one call under fake tensors."""
    import torch
    from csa_backend_fa4 import FA4Backend
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = len(compilations.kernels)
    backend = FA4Backend(recompute_p=shape.recompute_p)
    with FakeTensorMode(), torch.no_grad():
        call = make_call(shape)
        output, lse = backend.forward(call)
        gradients = backend.backward(call, output, lse, output, (True,) * 4)
    return {
        "output": describe(output),
        "output_strides_follow_query": output.stride() == call.query.stride(),
        "lse": describe(lse),
        "lse_contiguous": lse.is_contiguous(),
        "gradients": [describe(item) for item in gradients],
        "inputs": [
            describe(item)
            for item in (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
        ],
        "kernels": [kernel._asdict() for kernel in compilations.kernels[before:]],
    }


def lower_operands(arch: str) -> Iterator[Kernel]:
    """Our own kernel, for each width of the caller's slots and without any."""
    import triton
    from csa_backend_fa4.operands_kernel import ROWS, SLOTS, TOKENS, operands_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    capability = int(arch[3:-1])
    pointers = {"KV_INDICES": "*i32", "LOCAL": "*i16", "SPARSE": "*i16", "TABLE": "*i16"}
    pointers |= dict.fromkeys(("WINDOW_START", "POOL_START", "POOL_END", "INDICES"), "*i32")
    sizes = {"TOKENS": TOKENS, "SLOTS": SLOTS, "ROWS": ROWS, "D": 512, "POOLED": True}
    for slots, gather, bounded in (
        ("*i32", True, False),
        ("*i64", True, True),
        ("*i32", False, True),
    ):
        constants = {**sizes, "GATHER": gather, "BOUNDED": bounded}
        types = {**pointers, "KV_INDICES": slots, **dict.fromkeys(constants, "constexpr")}
        signature = {name: types.get(name, "i32") for name in operands_kernel.arg_names}
        source = ASTSource(operands_kernel, signature, constants)
        start = time.process_time()
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        seconds = time.process_time() - start
        yield examine("operands_kernel", compiled.asm["ptx"], compiled.asm["cubin"], seconds)


def main(arguments: list[str]) -> None:
    arch, *names = arguments
    choose_target(arch)
    lend_device_guard()
    import cutlass.cute
    import flash_attn.cute.interface as interface

    compilations = Compilations(cutlass.cute)
    interface.cute = compilations
    for name in names or ("operands", *CALLS):
        if name == "operands":
            kernels = [kernel._asdict() for kernel in lower_operands(arch)]
            print(json.dumps({"call": name, "kernels": kernels}), flush=True)
            continue
        print(json.dumps({"call": name, **lower(CALLS[name], compilations)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
