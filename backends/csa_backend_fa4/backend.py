"""The plug-in: what FA4's sparse-MLA kernels support, and the way to them."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from csa_dispatch import (
    FALSE,
    Availability,
    Backend,
    Between,
    Call,
    CallSpec,
    Capabilities,
    Gradients,
    OneOf,
    dense_slots_bounded,
    slot_layout,
)
from csa_dispatch.validation import fail

from .entry_points import availability

FORWARD = Capabilities(
    dtype=OneOf(("bfloat16", "float16"), others=("float32", "float64")),
    device_type=OneOf(("cuda",), others=("cpu", "meta")),
    capability=OneOf((100, 103), others=(90, 120)),
    heads=Between(1, 128),
    kv_heads=OneOf((1,), others=(2,)),
    head_dim=OneOf((512,), others=(128, 256, 576)),
    predicates=(dense_slots_bounded,),
    remedies=(
        ("dtype", "cast to bfloat16, or use eager, or triton for float32"),
        ("device_type", "use eager"),
        ("capability", "use triton, or eager below 80"),
        ("heads", "use triton up to 256 heads, or eager"),
        ("kv_heads", "use triton or eager"),
        ("head_dim", "use triton up to 576, or eager"),
    ),
)
# FA4 adds KV gradients by atomics; it takes deterministic=True and ignores it.
BACKWARD = dataclasses.replace(
    FORWARD,
    deterministic=FALSE,
    remedies=(*FORWARD.remedies, ("deterministic", "force triton or eager as backward_backend")),
)

_SCRATCH = "None takes a 64th of the device's memory."


class FA4Backend(Backend):
    """flash-attn-4's forward and backward for one KV head of 512 on SM100 and SM103.

    Args:
        recompute_p: see ``backward.Options``.
        scratch_bytes: see ``backward.Options``.
    """

    name = "fa4"
    summary = "FlashAttention-4's CuTe sparse-MLA kernels"
    forward_capabilities = FORWARD
    backward_capabilities = BACKWARD
    evidence = "lowered"

    def __init__(self, *, recompute_p: bool = True, scratch_bytes: int | None = None) -> None:
        if not isinstance(recompute_p, bool):
            fail("recompute_p", repr(recompute_p), "a bool", "Pass True or False.", TypeError)
        if scratch_bytes is not None:
            if isinstance(scratch_bytes, bool) or not isinstance(scratch_bytes, int):
                fail("scratch_bytes", repr(scratch_bytes), "an int or None", _SCRATCH, TypeError)
            if scratch_bytes <= 0:
                fail("scratch_bytes", scratch_bytes, "positive or None", _SCRATCH)
        self.recompute_p = recompute_p
        self.backward_uses_lse = recompute_p
        self.scratch_bytes = scratch_bytes

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
        from .backward import Options, backward

        options = Options(self.recompute_p, self.scratch_bytes)
        return backward(call, output, lse, grad_output, needs, options)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        width = slot_layout(spec).width
        found = [f"writes a table of {width} int32 slots a token, forward and backward"]
        if spec.pool and spec.window:
            found.append(f"copies the KV into one table of {spec.tokens + spec.pool} rows")
        if spec.strides != "aligned":
            found.append("copies query or KV whose rows are not on 16 bytes")
        if spec.differentiable and (spec.window == 0 or spec.documents == "cu_seqlens"):
            found.append("copies the upstream gradient: rows without keys are zeroed in it")
        return tuple(found)
