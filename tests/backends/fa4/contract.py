"""Ask the real flash-attn-4 what it says to calls outside its limits; nothing is compiled.

Run as a program, a process of its own (flash-attn-4 reads the target on import):

    python contract.py

Its compiler is replaced by one that compiles nothing, so a call is refused or "accepted". One JSON
line a case: forward or backward, its name, and the answer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.backends.fa4.lowering import choose_target, lend_device_guard

Arguments = dict[str, Any]
Change = Callable[[Arguments], object]


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def tensors(
    heads: int = 64, head_dim: int = 512, kv_heads: int = 1, batch: int = 1, slots: int = 256
) -> Arguments:
    """Operands as the adapter gives them, but for the sizes asked for."""
    tokens, rows = 256, 512
    return {
        "v": empty(batch, rows, kv_heads, head_dim),
        "qv": empty(batch, tokens, heads, head_dim),
        "gather_kv_indices": empty(batch, tokens, slots, dtype=torch.int32),
        "learnable_sink": empty(heads, dtype=torch.float32),
    }


def cast(dtype: torch.dtype, *names: str) -> Change:
    """Change the dtype of operands."""
    return lambda arguments: arguments.update(
        {name: empty(*arguments[name].shape, dtype=dtype) for name in names}
    )


def give(**values: Any) -> Change:
    """Add or replace arguments; a callable is called for its value, inside the fake mode."""
    return lambda arguments: arguments.update(
        {name: value() if callable(value) else value for name, value in values.items()}
    )


FORWARD: dict[str, tuple[Arguments, Change]] = {
    "as the adapter calls it": ({}, give()),
    "float16": ({}, cast(torch.float16, "v", "qv")),
    "float32": ({}, cast(torch.float32, "v", "qv")),
    "float64": ({}, cast(torch.float64, "v", "qv")),
    "capability 103": ({}, give(_arch=103)),
    "capability 90": ({}, give(_arch=90)),
    "capability 120": ({}, give(_arch=120)),
    **{f"{heads} heads": ({"heads": heads}, give()) for heads in (1, 7, 65, 127, 128, 129)},
    "2 KV heads": ({"kv_heads": 2}, give()),
    "2 KV heads of 128 query heads": ({"kv_heads": 2, "heads": 256}, give()),
    **{f"head_dim {size}": ({"head_dim": size}, give()) for size in (128, 256, 576)},
    **{f"{slots} slots": ({"slots": slots}, give()) for slots in (128, 640, 2176, 4096)},
    **{f"{slots} slots": ({"slots": slots}, give()) for slots in (0, 100, 192)},
    "int64 slots where int32 ones were compiled": ({}, cast(torch.int64, "gather_kv_indices")),
    "int64 slots, 128 heads": ({"heads": 128}, cast(torch.int64, "gather_kv_indices")),
    "int16 slots, 128 heads": ({"heads": 128}, cast(torch.int16, "gather_kv_indices")),
    "sink bfloat16": ({}, cast(torch.bfloat16, "learnable_sink")),
    "sink float16": ({}, cast(torch.float16, "learnable_sink")),
    "sink float64": ({}, cast(torch.float64, "learnable_sink")),
    "sink of 63 heads": ({}, give(learnable_sink=lambda: empty(63, dtype=torch.float32))),
    "no sink": ({}, give(learnable_sink=None)),
    "batch of 3": ({"batch": 3}, give()),
    "query head before token": (
        {},
        give(qv=lambda: empty(1, 64, 256, 512).transpose(1, 2)),
    ),
    "query expanded": ({}, give(qv=lambda: empty(1, 256, 1, 512).expand(1, 256, 64, 512))),
    "output head before token": (
        {},
        give(out=lambda: empty(1, 64, 256, 512).transpose(1, 2)),
    ),
    "output expanded": ({}, give(out=lambda: empty(1, 256, 1, 512).expand(1, 256, 64, 512))),
    "slots of 255 tokens": (
        {},
        give(gather_kv_indices=lambda: empty(1, 255, 256, dtype=torch.int32)),
    ),
    "causal window": ({}, give(window_size_left=128, window_size_right=0)),
}

BACKWARD: dict[str, tuple[Arguments, Change]] = {
    "as the adapter calls it": ({}, give()),
    "float16": ({}, cast(torch.float16, "v", "qv", "out", "dout")),
    "128 heads": ({"heads": 128}, give()),
    "129 heads": ({"heads": 129}, give()),
    "2 KV heads of 128 query heads": ({"kv_heads": 2, "heads": 256}, give()),
    "100 slots": ({"slots": 100}, give()),
    "int64 slots": ({}, cast(torch.int64, "gather_kv_indices")),
    "deterministic": ({}, give(deterministic=True)),
    "probabilities given though recomputed": ({}, give(p=lambda: empty(1, 256, 64, 256))),
    "probabilities neither given nor recomputed": ({}, give(recompute_p=False)),
    "chunk of one batch entry": ({}, give(token_chunk=128)),
    "chunk of two batch entries": ({"batch": 2}, give(token_chunk=128)),
}


def answer(call: Callable[..., Any], arguments: Arguments) -> str:
    """What ``call`` says."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            call(**arguments)
        except Exception as error:
            found = f"refused: {type(error).__name__}: {' '.join(str(error).split())}"
        else:
            found = "accepted"
    said = [str(item.message) for item in heard if "token_chunk" in str(item.message)]
    return "; ".join([found, *said])


def main() -> None:
    choose_target("sm_100a")
    lend_device_guard()
    import cutlass.cute
    import flash_attn.cute.interface as interface
    from csa_backend_fa4.entry_points import entry_points

    class Idle:
        def __getattr__(self, name: str) -> Any:
            return getattr(cutlass.cute, name)

        def compile(self, *_: Any, **__: Any) -> None:
            """Fake tensors launch nothing, so nothing is missed."""

    interface.cute = Idle()
    functions = entry_points()

    def forward(sizes: Arguments, change: Change) -> str:
        arguments = {"q": None, "k": None, **tensors(**sizes), "softmax_scale": 0.1}
        arguments |= {"pack_gqa": True, "return_lse": True, "gather_bwd_recompute_p": True}
        change(arguments)
        return answer(functions.forward, arguments)

    def backward(sizes: Arguments, change: Change) -> str:
        arguments = {"q": None, "k": None, **tensors(**sizes), "softmax_scale": 0.1}
        query = arguments["qv"]
        lse = empty(*query.shape[:3], dtype=torch.float32)
        arguments |= {"out": torch.empty_like(query), "dout": torch.empty_like(query)}
        arguments |= {"lse": lse, "p": None, "row_max": None, "recompute_p": True}
        change(arguments)
        return answer(functions.backward, arguments)

    for direction, cases, run in (
        ("forward", FORWARD, forward),
        ("backward", BACKWARD, backward),
    ):
        for name, (sizes, change) in cases.items():
            with FakeTensorMode(), torch.no_grad():
                found = run(sizes, change)
            print(json.dumps([direction, name, found]), flush=True)


if __name__ == "__main__":
    main()
