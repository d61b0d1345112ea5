"""The plug-in: what the backend claims and needs, and the way in and out."""

from __future__ import annotations

from importlib import metadata

import torch
from torch import Tensor

from csa_dispatch import (
    Availability,
    Backend,
    Call,
    CallSpec,
    Capabilities,
    Gradients,
    Kind,
    OneOf,
    Reason,
)

MOST_ROWS = 2**14


def rows_are_few(spec: CallSpec) -> Reason | None:
    """Query rows (B * T): at most 2**14, since each takes a turn of a Python loop."""
    rows = spec.batch * spec.tokens
    if rows <= MOST_ROWS:
        return None
    return Reason("rows_are_few", f"{rows} rows", f"at most {MOST_ROWS}", "Use eager.")


CAPABILITIES = Capabilities(
    kind=OneOf((Kind.WINDOW, Kind.GATHER), others=(Kind.DENSE,)),
    device_type=OneOf(("cpu",), others=("cuda",)),
    kv_heads=OneOf((1,), others=(2,)),
    documents=OneOf(("none",), others=("cu_seqlens", "doc_ids")),
    predicates=(rows_are_few,),
    remedies=(
        ("kind", "Use eager."),
        ("device_type", "Use triton."),
        ("kv_heads", "Use eager."),
        ("documents", "Use eager, or call it once a document."),
    ),
)


class RowwiseBackend(Backend):
    """Window and gather attention, one query row after the other."""

    name = "rowwise"
    summary = "one query row after the other, for reading"
    forward_capabilities = CAPABILITIES
    backward_capabilities = CAPABILITIES

    def probe(self) -> Availability:
        # A backend of a library looks for it here, without importing it, and says what is
        # missing or too old in the Availability's Reason.
        return Availability(f"csa-rowwise {metadata.version('csa-rowwise')}")

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        # What is heavy to import is imported when it is first needed.
        from .rows import forward

        with torch.no_grad():
            return forward(call)

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        from .rows import backward

        with torch.no_grad():
            found = backward(call, output, lse, grad_output)
        return Gradients(
            *(item if wanted else None for item, wanted in zip(found, needs, strict=True))
        )

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        return (f"a Python loop of {spec.batch * spec.tokens} turns",)
