"""The Backend: claims, version gate, and the way in and out of ``gather_attn``.

On a CPU Attention Gym's reference implementation runs, on CUDA its fused kernels. Where they
depart from our semantics, the adapter closes the gap (``reference``, ``fused``) or does not claim
the case (``Capabilities``).
"""

from __future__ import annotations

from importlib import metadata, util
from types import MappingProxyType

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
from csa_dispatch.call_spec import spec_of
from csa_dispatch.validation import fail

from .features import features, known_features
from .indexer import AttentionGymIndexer
from .sides import (
    Options,
    backward_predicates,
    family,
    forward_predicates,
)

SLOT_BYTES_LIMIT = 2 * 2**30
"""The reference gathers every slot of every token at once; beyond this it is no use."""

REMEDY = "pip install 'attn-gym>=0.0.17'"
_UNROLLED = "Pass the most slots that a kernel may unroll; 16 by default."
NO_GRADIENTS = (False, False, False, False)


def shared_or_full_heads(spec: CallSpec) -> Reason | None:
    """KV heads: 1 or as many as query heads."""
    if spec.kv_heads in (1, spec.heads):
        return None
    return Reason("kv_heads", str(spec.kv_heads), f"1 or {spec.heads}", "Use eager or triton.")


def gathered_slots_fit(spec: CallSpec) -> Reason | None:
    """On a CPU gathered slots (B, G, T, W + K, D in fp32): at most 2 GiB."""
    if spec.device_type != "cpu":
        return None
    slots = min(spec.window, spec.tokens)
    slots += spec.pool if spec.compress_ratio else spec.slots
    width = 8 if spec.dtype == "float64" else 4
    need = spec.batch * spec.kv_heads * spec.tokens * slots * spec.head_dim * width
    if need <= SLOT_BYTES_LIMIT:
        return None
    actual = f"{need / 2**30:.1f} GiB of gathered slots"
    return Reason("gathered_slots_fit", actual, "at most 2 GiB", "Use eager or triton.")


def reference_masks(spec: CallSpec) -> Reason | None:
    """On a CPU an attn-gym whose reference takes cu_seqlens: others let unused rows leak."""
    known = known_features()
    if spec.device_type != "cpu" or known.packed_offsets:
        return None
    actual = f"attn-gym {known.version}"
    return Reason("reference_masks", actual, "gather_attn with cu_seqlens on a CPU", REMEDY)


CPU_PREDICATES = (shared_or_full_heads, gathered_slots_fit, reference_masks)


def _capabilities(predicates: tuple) -> Capabilities:
    return Capabilities(
        device_type=OneOf(("cpu", "cuda"), others=("meta",)),
        dtype=OneOf(("float64", "float32", "bfloat16", "float16")),
        documents=OneOf(("none", "cu_seqlens"), others=("doc_ids",)),
        predicates=(*CPU_PREDICATES, *predicates),
        remedies=(
            ("documents", "Pass cu_seqlens, or use eager or triton."),
            ("device_type", "Use eager."),
        ),
    )


class AttentionGymBackend(Backend):
    """``attn_gym.sparse.gather_attn``: the reference on a CPU, the fused kernels on CUDA.

    Args:
        side: on CUDA, "triton" or "cute" (FlashAttention-4's kernels, SM100 and SM103) for one
            side's kernels, or "auto" for CuTe where it can run the call.
        most_unrolled: most slots (half of it at head_dim 512), and most window tiles, that the
            Triton forward may unroll outside Blackwell. Compile time grows steeply with them.
        recompute_p: False keeps the probabilities for the CuTe backward, where the version can.
    """

    name = "attention_gym"
    summary = "Attention Gym: its reference on a CPU, its fused kernels on CUDA"
    evidence = "CPU; SM90: verified; else contract-tested"
    operations = MappingProxyType({"lightning_indexer": AttentionGymIndexer()})

    def __init__(
        self, *, side: str = "auto", most_unrolled: int = 16, recompute_p: bool = True
    ) -> None:
        if side not in ("auto", "triton", "cute"):
            required = "'auto', 'triton' or 'cute'"
            fail("side", repr(side), required, "'auto' chooses for each call.")
        if isinstance(most_unrolled, bool) or not isinstance(most_unrolled, int):
            fail("most_unrolled", repr(most_unrolled), "an int", _UNROLLED, TypeError)
        if most_unrolled < 0:
            fail("most_unrolled", most_unrolled, "0 or more", _UNROLLED)
        if not isinstance(recompute_p, bool):
            fail("recompute_p", repr(recompute_p), "a bool", "Pass True or False.", TypeError)
        self.options = Options(side, most_unrolled, recompute_p)
        self.forward_capabilities = _capabilities(forward_predicates(self.options))
        self.backward_capabilities = _capabilities(backward_predicates(self.options))

    def probe(self) -> Availability:
        """Gate on the features the adapter needs, not on a version number."""
        if util.find_spec("attn_gym") is None:
            return Availability(
                "", Reason("availability", "attn_gym not installed", "attn-gym", REMEDY)
            )
        version = f"attn-gym {metadata.version('attn-gym')}"
        try:
            fused = features().fused
        except Exception as error:
            actual = f"broken ({type(error).__name__}: {error})"
            return Availability(version, Reason("availability", actual, "importable", REMEDY))
        if not fused:
            needed = "gather_attn with scale, impl and kernel_options"
            return Availability(version, Reason("availability", version, needed, REMEDY))
        return Availability(version)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.query.is_cuda:
            from .fused import forward

            side = family(spec_of(call, NO_GRADIENTS), self.options)
            return forward(call, side, self.options.recompute_p)
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
        del output, lse  # recomputed
        if call.query.is_cuda:
            from .fused import backward

            side = family(spec_of(call, needs), self.options)
            return backward(call, grad_output, needs, side, self.options.recompute_p)
        from .reference import reference_gradients

        return reference_gradients(call, grad_output, needs)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        if spec.device_type == "cuda":
            kernels = {"cute": "CuTe", "shared": "shared-KV Triton", "generic": "generic Triton"}
            found = [f"{kernels[family(spec, self.options)]} kernels"]
            found.append("copies the KV, zeros where it is not finite")
            if spec.differentiable:
                found.append("runs its forward again in the backward")
            return tuple(found)
        found = ["the reference gathers every slot of every token: memory grows with T * (W + K)"]
        if spec.dtype in ("bfloat16", "float16"):
            found.append("inputs are copied to fp32: its gradients accumulate in the input dtype")
        return tuple(found)
