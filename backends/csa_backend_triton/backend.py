"""The plug-in: what the Triton kernels support, and which of them run a call."""

from __future__ import annotations

import re
from importlib import metadata
from types import MappingProxyType

from torch import Tensor

from csa_dispatch.backend import Availability, Backend
from csa_dispatch.call import Call, Gradients, token_bounds
from csa_dispatch.call_spec import CallSpec, spec_of
from csa_dispatch.capabilities import Between, Capabilities, OneOf
from csa_dispatch.reasons import Reason

from .choice import backward_of, forward_of, on_hopper
from .compressor import TritonCompressor
from .indexer import TritonIndexer
from .interpreter import is_interpreted

MINIMUM_TRITON = (3, 6)
NO_GRADIENT = (False, False, False, False)


def _compute_capability(spec: CallSpec) -> Reason | None:
    """On CUDA the device is of compute capability 8.0 or newer."""
    if spec.device_type != "cuda" or spec.capability is None or spec.capability >= 80:
        return None
    return Reason("capability", str(spec.capability), "at least 80", "use the eager backend")


def _capabilities() -> Capabilities:
    interpreted = is_interpreted()
    return Capabilities(
        dtype=OneOf(("bfloat16", "float16", "float32"), others=("float64",)),
        device_type=OneOf(
            ("cuda", "cpu") if interpreted else ("cuda",),
            others=("meta",) if interpreted else ("cpu", "meta"),
        ),
        heads=Between(1, 256),
        head_dim=Between(1, 576),
        predicates=(_compute_capability,),
        remedies=(
            ("dtype", "use eager"),
            ("device_type", "set TRITON_INTERPRET=1 before start"),
            ("heads", "split the heads, or use eager"),
            ("head_dim", "use eager"),
        ),
    )


class TritonBackend(Backend):
    """Kernels written in Triton for SM80 to SM120, with specialised ones for Hopper."""

    name = "triton"
    summary = "our Triton kernels, SM80 to SM120, specialised for Hopper"
    forward_capabilities = _capabilities()
    backward_capabilities = _capabilities()
    backward_uses_lse = True
    operations = MappingProxyType(
        {"compress_kv": TritonCompressor(), "lightning_indexer": TritonIndexer()}
    )

    def probe(self) -> Availability:
        try:
            version = metadata.version("triton")
        except metadata.PackageNotFoundError:
            needed = f"triton {'.'.join(map(str, MINIMUM_TRITON))} or newer"
            return Availability(
                "", Reason("availability", "not installed", needed, "pip install triton")
            )
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if found < MINIMUM_TRITON:
            needed = f"triton {'.'.join(map(str, MINIMUM_TRITON))} or newer"
            return Availability(
                f"triton {version}",
                Reason("availability", f"triton {version}", needed, "pip install -U triton"),
            )
        return Availability(f"triton {version}" + (" interpreted" if is_interpreted() else ""))

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return forward_of(spec_of(call, NO_GRADIENT))(call, token_bounds(call))

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        spec, bounds = spec_of(call, needs), token_bounds(call)
        run = backward_of(spec)
        return run(call, bounds, output, lse, grad_output, needs, spec.deterministic)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        if spec.strides != "aligned" and on_hopper(spec):
            return (
                "copies a query or KV tensor whose rows are not contiguous and 16-byte aligned",
            )
        if spec.strides == "any":
            return ("copies a KV tensor whose last dimension is not contiguous",)
        return ()
