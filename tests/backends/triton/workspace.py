"""Most memory that a backward holds beyond its inputs and results, without a GPU.

Run as a program, as ``cross_compile.py`` is: it runs the real launch code on meta tensors and
starts nothing, follows every allocation, and prints one JSON line for each case.

    python workspace.py [NAME ...]
"""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any

import torch
from cross_compile import BASE, CompileOnlyDriver
from csa_backend_triton import launching
from csa_backend_triton.choice import backward_of, forward_of
from csa_backend_triton.compiling import meta_call
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from csa_dispatch.call import Kind, token_bounds
from csa_dispatch.call_spec import CallSpec, check_spec


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations inside make."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else [made]:
            if isinstance(item, Tensor):
                self._follow(item.untyped_storage())
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.held -= self.live.pop(key, 0)


def _cases() -> dict[str, CallSpec]:
    window = {"kind": Kind.WINDOW, "pool": 0}
    ordered = {"deterministic": True}
    fields: dict[str, dict[str, Any]] = {}
    for capability in (80, 90):
        for tokens in (131072, 1048576):
            sizes = {"capability": capability, "tokens": tokens, "pool": tokens // 4}
            name = f"sm_{capability} T={tokens}"
            fields[f"{name} gather"] = sizes
            fields[f"{name} window"] = {**sizes, **window}
            fields[f"{name} window, 8 KV heads"] = {**sizes, **window, "kv_heads": 8}
            fields[f"{name} dense"] = {
                **sizes,
                "kind": Kind.DENSE,
                "compress_ratio": 128,
                "pool": tokens // 128,
            }
        few = {"capability": capability, "tokens": 131072, "pool": 32768}
        name = f"sm_{capability}"
        fields[f"{name} ordered"] = {**few, **ordered}
        fields[f"{name} ordered, one slot"] = {**few, **ordered, "slots": 1}
        fields[f"{name} ordered, one slot, wide window"] = {
            **few,
            **ordered,
            "slots": 1,
            "window": 512,
            "heads": 128,
        }
        fields[f"{name} two KV heads"] = {**few, "kv_heads": 2}
        fields[f"{name} 256 columns"] = {**few, "head_dim": 256}
        fields[f"{name} 4096 slots"] = {
            "capability": capability,
            "heads": 128,
            "slots": 4096,
            "pool": 8192,
            "dtype": "float16",
            **ordered,
        }
    return {name: check_spec(BASE._replace(**change)) for name, change in fields.items()}


CASES = _cases()


def excess(spec: CallSpec) -> tuple[int, int]:
    """Peak bytes beyond inputs and results: of the forward, and of the backward."""
    assert spec.capability is not None
    driver.set_active(CompileOnlyDriver(spec.capability))
    with launching.compile_only(spec.capability):
        call = meta_call(spec)
        bounds = token_bounds(call)
        inputs = [item for item in (*call, *(bounds or ())) if isinstance(item, Tensor)]
        with Allocations(*inputs) as forward:
            results = forward_of(spec)(call, bounds)
        output, lse = results
        with Allocations(*inputs, *results) as backward:
            gradients = backward_of(spec)(
                call, bounds, output, lse, output, spec.needs_grad, spec.deterministic
            )
    kept = {item.untyped_storage()._cdata: item for item in gradients if item is not None}
    sizes = [item.untyped_storage().nbytes() for item in kept.values()]
    return forward.peak - output.nbytes - lse.nbytes, backward.peak - sum(sizes)


def main(names: list[str]) -> None:
    class Nothing:
        hash = ""

    # Kernels are neither compiled nor run: what they would be given is all that counts.
    JITFunction.warmup = lambda *_, **__: Nothing()  # type: ignore[method-assign]
    launching.settle_key = lambda _: None
    for name in names or CASES:
        forward, backward = excess(CASES[name])
        print(json.dumps({"name": name, "forward": forward, "backward": backward}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
