"""The plug-in: what cuDNN's sparse attention kernels support, and the way to them."""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor

from csa_dispatch import (
    Availability,
    Backend,
    Between,
    Call,
    CallSpec,
    Capabilities,
    Gradients,
    OneOf,
    Reason,
    dense_slots_bounded,
    slot_layout,
)

from .entry_points import availability
from .indexer import CudnnIndexer

BLACKWELL = (100, 103)
BLACKWELL_HEADS = (16, 32, 64, 128)

ELEMENTS_LIMIT = 2**31 - 1
"""Query elements that 32 bits address."""


def addresses_fit(spec: CallSpec) -> Reason | None:
    """Elements of the query (B, T, H, D): at most 2**31 - 1."""
    elements = spec.batch * spec.tokens * spec.heads * spec.head_dim
    if elements <= ELEMENTS_LIMIT:
        return None
    actual = f"{elements} elements of the query"
    return Reason("addresses_fit", actual, f"at most {ELEMENTS_LIMIT}", "use triton")


def blackwell_heads(spec: CallSpec) -> Reason | None:
    """On SM100 and SM103 the backward has 16, 32, 64 or 128 query heads."""
    if spec.capability not in BLACKWELL or spec.heads in BLACKWELL_HEADS:
        return None
    needed = "16, 32, 64 or 128 on Blackwell"
    return Reason("heads", str(spec.heads), needed, "use triton up to 256 heads, or eager")


def deterministic_on_blackwell(spec: CallSpec) -> Reason | None:
    """The backward is deterministic on SM100 and SM103 alone."""
    if not spec.deterministic or spec.capability in BLACKWELL:
        return None
    remedy = "force triton or eager as backward_backend"
    return Reason("deterministic", "True", "False below SM100", remedy)


# Advice must hold for every value outside a bound, and triton has bounds of its own: no float64,
# at most 256 heads, and head dims up to 576.
_REMEDIES = (
    ("dtype", "cast to bfloat16, or use eager, or triton for float32"),
    ("device_type", "use eager"),
    ("capability", "use triton, or eager below 80"),
    ("heads", "use triton up to 256 heads, or eager"),
    ("kv_heads", "use triton or eager"),
    ("head_dim", "use triton up to 576, or eager"),
)
# At head_dim 576 cuDNN's values are the first 512 columns of a key; ours are the whole key.
FORWARD = Capabilities(
    dtype=OneOf(("bfloat16", "float16"), others=("float32", "float64")),
    device_type=OneOf(("cuda",), others=("cpu", "meta")),
    capability=OneOf(BLACKWELL, others=(80, 90, 120)),
    heads=OneOf((64, 128), others=(16, 65)),
    kv_heads=OneOf((1,), others=(2,)),
    head_dim=OneOf((512,), others=(128, 256, 576)),
    predicates=(dense_slots_bounded, addresses_fit),
    remedies=_REMEDIES,
)
BACKWARD = Capabilities(
    dtype=FORWARD.dtype,
    device_type=FORWARD.device_type,
    capability=OneOf((90, *BLACKWELL), others=(80, 120)),
    heads=Between(2, 128),
    kv_heads=FORWARD.kv_heads,
    head_dim=FORWARD.head_dim,
    predicates=(
        dense_slots_bounded,
        addresses_fit,
        blackwell_heads,
        deterministic_on_blackwell,
    ),
    remedies=_REMEDIES,
)


class CudnnBackend(Backend):
    """cuDNN's sparse attention for one KV head of 512: backward on SM90, both on SM100."""

    name = "cudnn"
    summary = "cuDNN's DeepSeek sparse attention kernels"
    forward_capabilities = FORWARD
    backward_capabilities = BACKWARD
    backward_uses_lse = True
    evidence = "SM90: verified; SM100, SM103: lowered"
    operations = MappingProxyType({"lightning_indexer": CudnnIndexer()})

    def probe(self) -> Availability:
        return availability()

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        from .forward import forward

        return forward(call)

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        from .backward import backward

        return backward(call, output, lse, grad_output, needs)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        found = [
            f"writes a table of {slot_layout(spec).width} int32 slots a token",
            "copies query, output and upstream gradient unless they lie as [B, T, H, D]",
        ]
        if spec.pool and spec.window:
            rows = spec.batch * (spec.tokens + spec.pool)
            found.append(f"copies the KV into one table of {rows} rows")
        return tuple(found)
