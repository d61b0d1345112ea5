"""``compress_kv`` by our kernels: what they support, and the entry into them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from csa_dispatch import (
    Between,
    CompressorCall,
    CompressorCapabilities,
    CompressorSpec,
    OneOf,
    Operation,
    Reason,
)

from .interpreter import is_interpreted

LARGEST_RATIO = 256
"""All slots of an entry are one tile."""


def _compute_capability(spec: CompressorSpec) -> Reason | None:
    """On CUDA the device is of compute capability 8.0 or newer."""
    if spec.device_type != "cuda" or spec.capability is None or spec.capability >= 80:
        return None
    return Reason("capability", str(spec.capability), "at least 80", "use the eager backend")


def _capabilities() -> CompressorCapabilities:
    interpreted = is_interpreted()
    dtypes = ("bfloat16", "float16", "float32")
    return CompressorCapabilities(
        dtype=OneOf(dtypes, others=("float64",)),
        bias_dtype=OneOf(dtypes, others=("float64",)),
        device_type=OneOf(
            ("cuda", "cpu") if interpreted else ("cuda",),
            others=("meta",) if interpreted else ("cpu", "meta"),
        ),
        compress_ratio=Between(1, LARGEST_RATIO),
        predicates=(_compute_capability,),
        remedies=(
            ("dtype", "use eager"),
            ("bias_dtype", "cast it to float32, or use eager"),
            ("device_type", "set TRITON_INTERPRET=1 before start"),
            ("compress_ratio", "use eager"),
        ),
    )


class TritonCompressor(Operation):
    """One fused kernel a direction; the backward is deterministic."""

    forward_capabilities = _capabilities()
    backward_capabilities = _capabilities()

    def forward(self, call: CompressorCall) -> Tensor:
        from .compressor_launch import forward

        return forward(call)

    def backward(
        self, call: CompressorCall, *saved: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from .compressor_launch import backward

        return backward(call, *saved)
