"""Drive the real nvidia-cudnn-frontend until its kernels are machine code; no GPU needed.

Run as a program, a process per architecture:

    python lowering.py sm_100a [KERNEL ...]

First it asks the package whether it supports the calls of ``SUPPORT``, one JSON line each:
"support", the name, and "accepted" or what it says. Then it compiles the kernels named (of
``KERNELS``): "kernel", the name, the PTX target, tensor-core instructions and the ELF SM number.

The package compiles its SM100 kernels from metadata, so fake tensors, or small ones on the CPU,
stand for data; only the device's capability is pretended.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from csa_dispatch import SlotLayout
from tests.backends.fa4.lowering import choose_target, lend_device_guard

TOKENS, ROWS, HEAD_DIM = 1024, 1280, 512
FLASH, PRO = (SlotLayout(TOKENS, ROWS - TOKENS, 128, slots).width for slots in (512, 1024))
"""Slots of V4-Flash and V4-Pro, as the adapter pads them."""

KERNELS: dict[str, dict[str, Any]] = {
    "forward, 64 heads": {"heads": 64},
    "forward, 128 heads": {"heads": 128, "slots": PRO},
    "backward, 64 heads": {"heads": 64},
    "backward, 16 heads": {"heads": 16},
    "backward, 128 heads": {"heads": 128, "slots": PRO},
    "backward, 64 heads, float16": {"heads": 64, "dtype": torch.float16},
    "backward, 64 heads, deterministic": {"heads": 64, "deterministic": True},
}

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
SUPPORT: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    **{f"SM90 backward, {heads} heads": (HOPPER, {"heads": heads}) for heads in (2, 3, 64, 128)},
    "SM90 backward, float16": (HOPPER, {"dtype": torch.float16}),
    "SM90 backward, float32": (HOPPER, {"dtype": torch.float32}),
    "SM90 backward, head_dim 128": (HOPPER, {"head_dim": 128}),
    "SM90 backward, deterministic": (HOPPER, {"deterministic": True}),
    "SM90 backward, int64 slots": (HOPPER, {"index_dtype": torch.int64}),
    "SM80 backward": (AMPERE, {}),
    **{f"SM100 backward, {heads} heads": (BLACKWELL, {"heads": heads}) for heads in (16, 32)},
    **{
        f"SM100 backward, {heads} heads, deterministic": (
            BLACKWELL,
            {"heads": heads, "deterministic": True},
        )
        for heads in (16, 32, 40, 64, 128)
    },
    **{f"SM100 forward, {heads} heads": (BLACKWELL, {"heads": heads}) for heads in (16, 64, 128)},
    "SM100 forward, head_dim 128": (BLACKWELL, {"head_dim": 128}),
    "SM100 forward, float32": (BLACKWELL, {"dtype": torch.float32}),
    "SM90 forward": (HOPPER, {}),
}


def pretend(capability: tuple[int, int]) -> None:
    """Let CUDA look like a device of that capability."""
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore


def backward_plan(
    heads: int = 64,
    slots: int = FLASH,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = HEAD_DIM,
    index_dtype: torch.dtype = torch.int32,
    deterministic: bool = False,
):
    """cuDNN's plan for a backward as the adapter calls it, not yet checked."""
    from cudnn.deepseek_sparse_attention import SparseAttentionBackward

    def empty(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=of, device="cuda:0")

    with FakeTensorMode():
        rows = [empty(TOKENS, heads, head_dim) for _ in range(3)]
        return SparseAttentionBackward(
            rows[0],
            empty(ROWS, head_dim),
            rows[1],
            rows[2],
            empty(TOKENS, heads, of=torch.float32),
            empty(heads, of=torch.float32),
            empty(TOKENS, slots, of=index_dtype),
            softmax_scale=head_dim**-0.5,
            deterministic=deterministic,
        )


def forward_plan(heads: int = 64, dtype: torch.dtype = torch.bfloat16, head_dim: int = HEAD_DIM):
    """cuDNN's plan for a forward as the adapter calls it, not yet checked."""
    from cudnn.deepseek_sparse_attention import SparseAttentionForward

    with FakeTensorMode():
        return SparseAttentionForward(
            torch.empty(TOKENS, heads, head_dim, dtype=dtype, device="cuda:0"),
            torch.empty(ROWS, head_dim, dtype=dtype, device="cuda:0"),
            torch.empty(TOKENS, FLASH, dtype=torch.int32, device="cuda:0"),
            torch.empty(heads, device="cuda:0"),
        )


def answer(name: str, sizes: dict[str, Any]) -> str:
    """What the package says to a call."""
    plan = forward_plan if "forward" in name else backward_plan
    try:
        plan(**sizes).check_support()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "accepted"


def compiled(name: str, sizes: dict[str, Any]) -> Any:
    """A kernel of the package for the pretended device."""
    if "backward" in name:
        plan = backward_plan(**sizes)
        plan.check_support()
        plan.compile()
        return plan._compiled_kernel
    import cutlass.cute as cute
    from cudnn.deepseek_sparse_attention.sparse_attention_forward import _interface_sm100 as inner

    heads, slots, tokens = sizes["heads"], sizes.get("slots", FLASH), 8

    def empty(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    return inner._compile_kernel(
        inner._make_kernel(inner._kernel_variant(heads, HEAD_DIM), HEAD_DIM, 0),
        empty(tokens, heads, HEAD_DIM),
        empty(ROWS, HEAD_DIM),
        empty(tokens, slots, of=torch.int32),
        empty(tokens, heads, HEAD_DIM),
        empty(tokens, heads, of=torch.float32),
        empty(tokens, heads, of=torch.float32),
        None,
        empty(heads, of=torch.float32),
        None,
        HEAD_DIM**-0.5,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False),
        torch.device("cuda:0"),
    )


def main(arch: str, names: list[str]) -> None:
    choose_target(arch)
    lend_device_guard()
    for name, (capability, sizes) in SUPPORT.items():
        pretend(capability)
        print(json.dumps(["support", name, answer(name, sizes)]), flush=True)
    pretend((10, 3) if arch == "sm_103a" else (10, 0))
    for name in names:
        kernel = compiled(name, KERNELS[name])
        (target,) = re.findall(r"^\.target\s+(\w+)", kernel.__ptx__, re.MULTILINE)
        assert kernel.__cubin__[:4] == b"\x7fELF"
        multiprocessor = int.from_bytes(kernel.__cubin__[48:52], "little") >> 8 & 0xFF
        row = ["kernel", name, target, kernel.__ptx__.count("tcgen05.mma"), multiprocessor]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
