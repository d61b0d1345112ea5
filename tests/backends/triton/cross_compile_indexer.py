"""Compile the indexer's kernels for any NVIDIA architecture on a machine without a GPU.

As ``cross_compile.py``, for ``lightning_indexer``:

    python cross_compile_indexer.py CAPABILITY [NAME ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from cross_compile import SHARED_LIMIT, CompileOnlyDriver, assemble
from csa_backend_triton.indexer import pick_entries
from csa_backend_triton.launching import compile_only
from triton.runtime.driver import driver

from csa_dispatch import IndexerCall, IndexerSpec

BASE = IndexerSpec(tokens=16384, pool=4096)
CALLS = {
    "model": BASE,
    "packed": BASE._replace(documents="cu_seqlens", dtype="float16", weights_dtype="float16"),
    "fp32": BASE._replace(dtype="float32"),
    "decode": BASE._replace(tokens=1, batch=4, with_past=True),
    "odd": BASE._replace(head_dim=80, heads=3),
    "long": BASE._replace(pool=65536, tokens=262144),
}


def meta_call(spec: IndexerSpec) -> IndexerCall:
    """A call on meta tensors that ``spec`` describes."""
    dtype = getattr(torch, spec.dtype)
    with torch.device("meta"):
        query = torch.empty(spec.batch, spec.heads, spec.tokens, spec.head_dim, dtype=dtype)
        keys = torch.empty(spec.batch, spec.pool, spec.head_dim, dtype=dtype)
        weights = torch.empty(
            spec.batch, spec.tokens, spec.heads, dtype=getattr(torch, spec.weights_dtype)
        )
        offsets = torch.empty(3, dtype=torch.int32) if spec.documents == "cu_seqlens" else None
    past = spec.pool * spec.compress_ratio if spec.with_past else 0
    return IndexerCall(
        query, keys, weights, spec.topk, spec.compress_ratio, past, offsets, offsets
    )


def compile_call(name: str, capability: int) -> Iterator[dict[str, Any]]:
    """What each kernel of a call uses: bytes of shared memory, registers, spilled bytes."""
    with compile_only(capability) as session:
        pick_entries(meta_call(CALLS[name]))
    seen: set[str] = set()
    for kernel, constants, compiled in session.kernels:
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        registers, spills, _ = assemble(compiled.asm["ptx"], capability)
        yield {
            "call": name,
            "kernel": kernel,
            "constants": constants,
            "shared": compiled.metadata.shared,
            "shared_limit": SHARED_LIMIT[capability],
            "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
            "registers": registers,
            "spills": spills,
            "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
            "tcgen05": compiled.asm["ptx"].count("tcgen05.mma"),
        }


def main(arguments: list[str]) -> None:
    capability = int(arguments[0])
    driver.set_active(CompileOnlyDriver(capability))
    for name in arguments[1:] or CALLS:
        for compiled in compile_call(name, capability):
            print(json.dumps(compiled), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
