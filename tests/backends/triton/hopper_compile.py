"""Compile the Hopper kernels on a machine without a GPU; prints one JSON line for each.

A program of its own, since Triton cannot interpret and compile in one process, and may abort.
"""

from __future__ import annotations

import json
import re

import torch
from cross_compile import SHARED_LIMIT, CompileOnlyDriver, assemble
from csa_backend_triton import hopper, hopper_gradient
from csa_backend_triton.launching import compile_only
from csa_backend_triton.warmup import meta_call
from triton.runtime.driver import driver

from csa_dispatch.call import Kind, token_bounds
from csa_dispatch.call_spec import CallSpec

BASE = CallSpec(needs_grad=(True, True, True, True), head_dim=512, heads=64, tokens=4096)
SPECS = (
    BASE,
    BASE._replace(kind=Kind.DENSE, compress_ratio=128),
)


def main() -> None:
    driver.set_active(CompileOnlyDriver(90))
    seen: set[str] = set()
    for spec in SPECS:
        assert hopper.supports_forward(spec._replace(capability=90))
        with compile_only(90) as session:
            call = meta_call(spec)
            bounds = token_bounds(call)
            output, lse = hopper.forward(call, bounds)
            for deterministic in (False, True) if spec.kind is not Kind.DENSE else (False,):
                results = (call, bounds, output, lse, output, spec.needs_grad, deterministic)
                hopper_gradient.backward(*results)
        for name, _, compiled in session.kernels:
            if compiled.hash in seen:
                continue
            seen.add(compiled.hash)
            ptx = compiled.asm["ptx"]
            _, spills, serialized = assemble(ptx, 90)
            found = {
                "kernel": f"{name} of {spec.kind.value}",
                "shared": compiled.metadata.shared,
                "limit": SHARED_LIMIT[90],
                "spills": spills,
                "serialized": serialized,
                "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
                "reductions": len(re.findall(r"\bred\.[\w.]*global[\w.]*\.v4\.f32", ptx)),
                "other_atomics": len(re.findall(r"\b(?:atom|red)\.global", ptx)),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
