"""Compile the compressor's kernels for any NVIDIA architecture on a machine without a GPU.

As ``cross_compile.py``, for ``compress_kv``:

    python cross_compile_compressor.py CAPABILITY[,CAPABILITY...] [NAME ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from cross_compile import SHARED_LIMIT, CompileOnlyDriver, assemble
from csa_backend_triton.compressor_launch import backward, forward
from csa_backend_triton.launching import compile_only
from triton.runtime.driver import driver

from csa_dispatch import CompressorCall, CompressorSpec

BASE = CompressorSpec(needs_grad=(True, True, True))
PLAIN = BASE._replace(overlapping=False, compress_ratio=128)
CALLS = {
    "overlapping": BASE,
    "overlapping-packed": BASE._replace(documents="cu_seqlens"),
    "overlapping-fp32": BASE._replace(dtype="float32"),
    "overlapping-128": BASE._replace(head_dim=128),
    "plain": PLAIN,
    "plain-packed": PLAIN._replace(documents="cu_seqlens", dtype="float16"),
    "odd": BASE._replace(compress_ratio=3, head_dim=80),
    "largest": BASE._replace(compress_ratio=256),
    "values-alone": BASE._replace(needs_grad=(True, False, False)),
}


def meta_call(spec: CompressorSpec) -> CompressorCall:
    """A call on meta tensors that ``spec`` describes."""
    channels = spec.head_dim * (2 if spec.overlapping else 1)
    dtype = getattr(torch, spec.dtype)
    with torch.device("meta"):
        tokens = torch.empty(spec.batch, spec.tokens, channels, dtype=dtype)
        bias = torch.empty(spec.compress_ratio, channels, dtype=getattr(torch, spec.bias_dtype))
        offsets = torch.empty(3, dtype=torch.int32) if spec.documents == "cu_seqlens" else None
    return CompressorCall(
        tokens, tokens, bias, spec.compress_ratio, spec.overlapping, offsets, offsets
    )


def compile_call(name: str, capability: int) -> Iterator[dict[str, Any]]:
    """What each kernel of a call uses: bytes of shared memory, registers, spilled bytes."""
    spec = CALLS[name]
    call = meta_call(spec)
    with compile_only(capability) as session:
        backward(call, forward(call), spec.needs_grad)
    for kernel, _, compiled in session.kernels:
        registers, spills, _ = assemble(compiled.asm["ptx"], capability)
        yield {
            "call": name,
            "kernel": kernel,
            "shared": compiled.metadata.shared,
            "shared_limit": SHARED_LIMIT[capability],
            "registers": registers,
            "spills": spills,
        }


def main(arguments: list[str]) -> None:
    for capability in map(int, arguments[0].split(",")):
        driver.set_active(CompileOnlyDriver(capability))
        for name in arguments[1:] or CALLS:
            for compiled in compile_call(name, capability):
                print(json.dumps({"capability": capability, **compiled}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
