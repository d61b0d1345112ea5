"""Drive cuDNN's indexer through the adapter until its kernels are machine code; no GPU needed.

Run as a program, a process per architecture:

    python lowering_indexer.py sm_90a

For each call of ``CALLS`` it prints a JSON line: "call", the name, and "accepted" or what the
package says. Every kernel that is compiled on the way is a line too: "kernel", which of the two,
the PTX target, tensor-core instructions and the ELF SM number.

The score kernel is compiled from small tensors on the CPU that say they are on CUDA, the top-k
from fake ones, as the package does itself. Nothing is launched.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import replace
from typing import Any

import torch
from csa_backend_cudnn import backend, indexer
from csa_backend_cudnn.entry_points import IndexerEntryPoints
from torch._subclasses.fake_tensor import FakeTensorMode

from csa_dispatch.testing.indexer import IndexerCase, build_indexer
from tests.backends.cudnn.lowering import pretend
from tests.backends.fa4.lowering import choose_target, lend_device_guard

CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
BASE = IndexerCase(
    "model", "bfloat16", heads=64, tokens=40, head_dim=128, topk=5, compress_ratio=1
)
CALLS = (
    BASE,
    replace(BASE, name="bf16 weights", weights_dtype="bfloat16"),
    replace(BASE, name="packed", documents=(11, 0, 20, 9)),
    replace(BASE, name="batched past", batch=2, past=100),
    *(replace(BASE, name=f"{heads} heads", heads=heads) for heads in (4, 8, 16, 32, 48, 128)),
    replace(BASE, name="float16", dtype="float16"),
    replace(BASE, name="head_dim 64", head_dim=64),
    replace(BASE, name="512 of 16384", tokens=1200, past=15184, topk=512),
    replace(BASE, name="1024 of 16384", tokens=1200, past=15184, topk=1024),
    replace(BASE, name="2048 picks", tokens=2100, heads=16, topk=2048),
    replace(BASE, name="2049 picks", tokens=2100, heads=16, topk=2049),
)


def show(name: str, kernel: Any) -> None:
    """Print what a compiled kernel says of itself."""
    (target,) = re.findall(r"^\.target\s+(\w+)", kernel.__ptx__, re.MULTILINE)
    assert kernel.__cubin__[:4] == b"\x7fELF"
    multiprocessor = int.from_bytes(kernel.__cubin__[48:52], "little") >> 8 & 0xFF
    tensor_core = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", kernel.__ptx__))
    print(json.dumps(["kernel", name, target, tensor_core, multiprocessor]), flush=True)


def scores(*arguments: Any, **options: Any) -> Any:
    """The package's function on tensors that say they are on CUDA."""
    import cutlass.cute as cute
    from cudnn.deepseek_sparse_attention import indexer_forward_wrapper

    options["stream"] = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False)
    place = torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    try:
        return indexer_forward_wrapper(*arguments, **options)
    finally:
        torch.Tensor.is_cuda = place


def top_k(
    input_values: torch.Tensor, seq_lens: torch.Tensor, top_k: int, **options: Any
) -> dict[str, torch.Tensor]:
    """The package's plan for the call, compiled; no picks."""
    from cudnn.deepseek_sparse_attention import IndexerTopK

    with FakeTensorMode():
        sample = torch.empty(input_values.shape, dtype=input_values.dtype, device="cuda:0")
        lengths = torch.empty(seq_lens.shape, dtype=seq_lens.dtype, device="cuda:0")
        plan = IndexerTopK(sample, lengths, top_k, **options)
    plan.check_support()
    plan.compile()
    show("top_k", plan._compiled_kernel)
    return {"indices": seq_lens.new_zeros(len(seq_lens), top_k)}


class Compiling:
    """Stands in for ``cutlass.cute`` in the package and launches nothing."""

    def __init__(self, cute: Any) -> None:
        self._cute = cute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cute, name)

    def compile(self, *arguments: Any, **options: Any) -> Any:
        show("scores", self._cute.compile(*arguments, **options))
        return lambda *launched: None


def main(arch: str) -> None:
    choose_target(arch)
    lend_device_guard()
    pretend(CAPABILITIES[arch])
    import cutlass.cute as cute
    from cudnn.deepseek_sparse_attention.indexer_forward import _interface, _interface_sm90

    for module in (_interface, _interface_sm90):
        module.cute = Compiling(cute)
        module._torch_stream_context = lambda stream: contextlib.nullcontext()
    torch.cuda.nvtx.range = lambda message: contextlib.nullcontext()
    indexer.indexer_entry_points = lambda: IndexerEntryPoints(scores, top_k)
    for case in CALLS:
        try:
            backend.operations["lightning_indexer"].forward(build_indexer(case))
            answer = "accepted"
        except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
            answer = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps(["call", case.name, answer]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
