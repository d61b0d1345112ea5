"""Generated calls of ``compress_kv``: small, with NaN wherever no entry may read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.compressor_call import (
    CompressorCall,
    CompressorNeeds,
    CompressorSpec,
    compressor_spec_of,
    pool_offsets,
)

ALL: CompressorNeeds = (True, True, True)


@dataclass(frozen=True)
class CompressorCase:
    """One generated call.

    Attributes:
        documents: lengths of packed documents, or empty.
        needs_grad: which of values, gates and position_bias need gradients.
        gate_offset: added to every gate: far from 0 their exponentials overflow unless the
            largest is taken off first.
        memory: ``"contiguous"``, or ``"fused"``: values and gates are halves of one tensor that
            lies with batch and tokens exchanged, and the upstream gradient is expanded.
    """

    name: str
    dtype: str = "float32"
    bias_dtype: str = "float32"
    batch: int = 1
    tokens: int = 22
    head_dim: int = 16
    compress_ratio: int = 4
    overlapping: bool = True
    documents: tuple[int, ...] = ()
    needs_grad: CompressorNeeds = ALL
    gate_offset: float = 0.0
    memory: str = "contiguous"
    seed: int = 0

    def spec(self, device: str = "cpu", capability: int | None = None) -> CompressorSpec:
        """The case's CompressorSpec on a device."""
        call = build_compressor(self).call
        spec = compressor_spec_of(call, self.needs_grad)
        return spec._replace(device_type=device, capability=capability)


CASES = (
    CompressorCase("overlapping", batch=2),
    CompressorCase("overlapping-no-tail", tokens=16),
    CompressorCase("overlapping-packed", tokens=34, documents=(5, 0, 1, 15, 8)),
    CompressorCase("overlapping-by-3", tokens=11, compress_ratio=3, head_dim=5),
    CompressorCase("plain", compress_ratio=8, overlapping=False, tokens=27),
    CompressorCase("plain-packed", overlapping=False, tokens=40, documents=(3, 11, 1, 25)),
    CompressorCase("128", compress_ratio=128, overlapping=False, tokens=260, head_dim=3),
    CompressorCase("one-token", compress_ratio=1, overlapping=False, tokens=7, head_dim=3),
    CompressorCase("fewer-than-a-block", tokens=3),
    CompressorCase("documents-too-short", tokens=9, documents=(2, 3, 1)),
    CompressorCase("large-gates", gate_offset=1e3),
    CompressorCase("fused", batch=2, memory="fused"),
    CompressorCase("no-gradient", needs_grad=(False, False, False)),
    CompressorCase("values-alone", needs_grad=(True, False, False)),
    CompressorCase("gates-and-bias", needs_grad=(False, True, True)),
)
"""What every backend must get right, in float32; ``compressor_cases`` has the other dtypes."""


def compressor_cases(dtypes: Sequence[str] = ("float32", "bfloat16")) -> list[CompressorCase]:
    """``CASES`` in each of ``dtypes``, biases in turn float32 and of the values' dtype."""
    found = []
    for dtype in dtypes:
        for position, case in enumerate(CASES):
            bias = dtype if position % 2 else "float32"
            found.append(replace(case, name=f"{case.name}-{dtype}", dtype=dtype, bias_dtype=bias))
    return found


class CompressorInputs(NamedTuple):
    """A call, its upstream gradient ``[B, T // r, D]`` and the gradients to work out."""

    call: CompressorCall
    grad_entries: Tensor
    needs_grad: CompressorNeeds


def build_compressor(case: CompressorCase, device: torch.device | str = "cpu") -> CompressorInputs:
    """The case's call; the same data on every device. Nothing requires gradients."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, bias_dtype = getattr(torch, case.dtype), getattr(torch, case.bias_dtype)
    channels = case.head_dim * (2 if case.overlapping else 1)
    ratio = case.compress_ratio
    fused = 2 * torch.randn(case.batch, case.tokens, 2 * channels, generator=generator)
    fused[..., channels:] += case.gate_offset
    bias = torch.randn(ratio, channels, generator=generator)
    cu_seqlens = cu_seqlens_k = None
    ends = [case.tokens]
    if case.documents:
        cu_seqlens = torch.tensor((0, *case.documents)).cumsum(0).to(torch.int32)
        cu_seqlens_k = pool_offsets(cu_seqlens, ratio)
        ends = cu_seqlens[1:].tolist()
    for start, end in pairwise([0, *ends]):
        fused[:, start + (end - start) // ratio * ratio : end] = math.nan
        if case.overlapping:  # no entry after the last one pools its branch a
            last = max(start, start + (end - start) // ratio * ratio - ratio)
            for first in (0, channels):
                fused[:, last:end, first : first + case.head_dim] = math.nan
    fused[:, ends[-1] :] = math.nan
    if case.memory == "fused":
        fused = fused.transpose(0, 1).contiguous().transpose(0, 1)
    values, gates = fused.to(dtype).to(device).split(channels, -1)
    if case.memory == "contiguous":
        values, gates = values.contiguous(), gates.contiguous()
    call = CompressorCall(
        values,
        gates,
        bias.to(bias_dtype).to(device),
        ratio,
        case.overlapping,
        None if cu_seqlens is None else cu_seqlens.to(device),
        None if cu_seqlens_k is None else cu_seqlens_k.to(device),
    )
    shape = (case.batch, call.entries, case.head_dim)
    grad = torch.randn(shape, generator=generator)
    if cu_seqlens_k is not None:
        grad[:, int(cu_seqlens_k[-1]) :] = math.nan
    if case.memory == "fused":
        grad = torch.ones(1, 1, 1)
    grad = grad.to(dtype).to(device).expand(shape)
    return CompressorInputs(call, grad, case.needs_grad)
