"""The plug-in: what FlexAttention runs of our calls."""

from __future__ import annotations

import dataclasses
from importlib import util

import torch
from torch import Tensor

from csa_dispatch import (
    Availability,
    Backend,
    Between,
    Call,
    CallSpec,
    Capabilities,
    Gradients,
    Kind,
    OneOf,
    Reason,
)

SCORE_BYTES_LIMIT = 2**30
"""Scores that a call may have on a CPU, where FlexAttention writes them all down."""

ELEMENTS_LIMIT = 2**31 - 1
"""Query elements that 32 bits address."""


def scores_fit(spec: CallSpec) -> Reason | None:
    """On a CPU the scores (B, H, T, T + S, as fp32) take at most 1 GiB."""
    if spec.device_type != "cpu":
        return None
    width = 8 if spec.dtype == "float64" else 4
    need = spec.batch * spec.heads * spec.tokens * (spec.tokens + spec.pool) * width
    if need <= SCORE_BYTES_LIMIT:
        return None
    actual = f"{need / 2**30:.1f} GiB of scores"
    return Reason("scores_fit", actual, "at most 1 GiB on a CPU", "Use eager.")


def triton_on_cuda(spec: CallSpec) -> Reason | None:
    """On CUDA it needs triton and capability 8.0 or newer."""
    if spec.device_type != "cuda":
        return None
    if util.find_spec("triton") is None:
        return Reason("triton_on_cuda", "triton not installed", "triton", "pip install triton")
    if spec.capability is not None and spec.capability < 80:
        return Reason("capability", str(spec.capability), "80 or newer", "Use eager.")
    return None


def compiled_sizes(spec: CallSpec) -> Reason | None:
    """On CUDA: head dims that are powers of 2, in float32 up to 256; not float64."""
    if spec.device_type != "cuda":
        return None
    if spec.dtype == "float64":
        needed = "float32, bfloat16 or float16 on CUDA"
        return Reason("dtype", spec.dtype, needed, "Use eager.")
    most = 256 if spec.dtype == "float32" else 512
    if spec.head_dim > most or spec.head_dim & (spec.head_dim - 1):
        needed = f"a power of 2 up to {most} on CUDA"
        return Reason("head_dim", str(spec.head_dim), needed, "Use triton up to 576, or eager.")
    return None


def addresses_fit(spec: CallSpec) -> Reason | None:
    """Elements of the query (B, H, T, D): at most 2**31 - 1."""
    elements = spec.batch * spec.heads * spec.tokens * spec.head_dim
    if elements <= ELEMENTS_LIMIT:
        return None
    actual = f"{elements} elements of the query"
    return Reason("addresses_fit", actual, f"at most {ELEMENTS_LIMIT}", "Use triton.")


FORWARD = Capabilities(
    kind=OneOf((Kind.WINDOW, Kind.DENSE), others=(Kind.GATHER,)),
    dtype=OneOf(("float64", "float32", "bfloat16", "float16")),
    device_type=OneOf(("cpu", "cuda"), others=("meta",)),
    head_dim=Between(16, 512),
    predicates=(scores_fit, triton_on_cuda, compiled_sizes, addresses_fit),
    remedies=(
        ("kind", "Use triton or eager: no static mask says what indices select."),
        ("device_type", "Use eager."),
        ("head_dim", "Use triton up to 576, or eager."),
    ),
)
BACKWARD = dataclasses.replace(
    FORWARD,
    device_type=OneOf(("cuda",), others=("cpu", "meta")),
    remedies=(
        *FORWARD.remedies[:1],
        ("device_type", "FlexAttention has no backward there: backward_backend='eager'."),
        *FORWARD.remedies[2:],
    ),
)


class FlexBackend(Backend):
    """``torch.nn.attention.flex_attention`` with analytic BlockMasks and the sink through lse."""

    name = "flex"
    summary = "torch FlexAttention (no backward on a CPU)"
    forward_capabilities = FORWARD
    backward_capabilities = BACKWARD
    evidence = "CPU; SM90: verified; else contract-tested"

    def probe(self) -> Availability:
        version = f"torch {torch.__version__}"
        from torch.nn.attention import flex_attention

        if not hasattr(flex_attention, "AuxRequest"):
            needed = "flex_attention with return_aux"
            remedy = "pip install 'torch>=2.9'"
            return Availability(version, Reason("availability", version, needed, remedy))
        return Availability(version)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        from .attend import forward

        return forward(call)

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        from .attend import backward

        return backward(call, output, lse, grad_output, needs)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        rows = spec.tokens + spec.pool
        found = [f"copies the KV into one table of {rows} rows, zeros where they are not finite"]
        if spec.device_type == "cpu":
            found.append("writes down all scores: memory grows with T * (T + S)")
        if spec.documents != "none":
            found.append("makes a BlockMask each call, which other calls keep")
        if spec.differentiable:
            found.append("runs FlexAttention's forward again in the backward")
            if spec.kind is Kind.DENSE and spec.device_type == "cuda":
                found.append("walks all tokens once for each few pool rows in the backward: slow")
        return tuple(found)
