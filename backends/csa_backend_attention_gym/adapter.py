"""The Backend: claims, version gate, and the way in and out of ``gather_attn``.

Where the reference implementation departs from our semantics, the adapter closes the gap
(``reference_call``) or does not claim the case (``Capabilities``).
"""

from __future__ import annotations

from importlib import metadata, util

import torch
from torch import Tensor

from csa_dispatch import (
    Availability,
    Backend,
    Call,
    CallSpec,
    Capabilities,
    Gradients,
    OneOf,
    Reason,
)

SLOT_BYTES_LIMIT = 2 * 2**30
"""The reference gathers every slot of every token at once; beyond this it is no use."""


def shared_or_full_heads(spec: CallSpec) -> Reason | None:
    """KV heads: 1 or as many as query heads."""
    if spec.kv_heads in (1, spec.heads):
        return None
    return Reason("kv_heads", str(spec.kv_heads), f"1 or {spec.heads}", "Use eager or triton.")


def gathered_slots_fit(spec: CallSpec) -> Reason | None:
    """Gathered slots (B, G, T, W + K, D in fp32): at most 2 GiB."""
    slots = min(spec.window, spec.tokens)
    slots += spec.pool if spec.compress_ratio else spec.slots
    width = 8 if spec.dtype == "float64" else 4
    need = spec.batch * spec.kv_heads * spec.tokens * slots * spec.head_dim * width
    if need <= SLOT_BYTES_LIMIT:
        return None
    actual = f"{need / 2**30:.1f} GiB of gathered slots"
    return Reason("gathered_slots_fit", actual, "at most 2 GiB", "Use eager or triton.")


CAPABILITIES = Capabilities(
    device_type=OneOf(("cpu",), others=("cuda",)),
    dtype=OneOf(("float64", "float32", "bfloat16", "float16")),
    documents=OneOf(("none", "cu_seqlens"), others=("doc_ids",)),
    predicates=(shared_or_full_heads, gathered_slots_fit),
    remedies=(
        ("documents", "Pass cu_seqlens, or use eager or triton."),
        ("device_type", "Use triton or eager on CUDA."),
    ),
)


class AttentionGymBackend(Backend):
    """``attn_gym.sparse.gather_attn`` with ``impl="reference"``."""

    name = "attention_gym"
    summary = "Attention Gym's eager reference implementation (CPU)"
    backward_uses_lse = False  # autograd runs its forward again
    forward_capabilities = CAPABILITIES
    backward_capabilities = CAPABILITIES

    def probe(self) -> Availability:
        """Gate on the feature the adapter needs, packed offsets, not on a version number."""
        remedy = "pip install 'attn-gym>=0.0.17'"
        if util.find_spec("attn_gym") is None:
            return Availability(
                "", Reason("availability", "attn_gym not installed", "attn-gym", remedy)
            )
        version = f"attn-gym {metadata.version('attn-gym')}"
        try:
            from .reference import has_packed_offsets

            packed = has_packed_offsets()
        except Exception as error:
            actual = f"broken ({type(error).__name__}: {error})"
            return Availability(version, Reason("availability", actual, "importable", remedy))
        if not packed:
            return Availability(
                version, Reason("availability", version, "gather_attn with cu_seqlens", remedy)
            )
        return Availability(version)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        from .reference import reference_call

        with torch.no_grad():
            return reference_call(call)

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        from .reference import reference_gradients

        return reference_gradients(call, grad_output, needs)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        found = ["the reference gathers every slot of every token: memory grows with T * (W + K)"]
        if spec.dtype in ("bfloat16", "float16"):
            found.append("inputs are copied to fp32: its gradients accumulate in the input dtype")
        return tuple(found)
