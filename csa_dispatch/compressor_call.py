"""One ``compress_kv`` call: as a backend sees it, as routing sees it, and what claims bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .call_spec import deterministic_mode, device_capability, stride_class
from .capabilities import ANY, Allowed, Claims

CompressorNeeds = tuple[bool, bool, bool]
"""Which of values, gates and position_bias need gradients."""


class CompressorCall(NamedTuple):
    """The tensors and scalars of one validated call of ``compress_kv``.

    Tensors have arbitrary strides. Backends only read them. An ``Operation`` named "compress_kv"
    has ``forward(call)`` return entries ``[B, T // r, D]`` in the values' dtype, and
    ``backward(call, grad_entries, needs)`` the gradients of values, gates and position_bias in
    their shapes and dtypes, None for each that CompressorNeeds does not ask for.

    Attributes:
        values, gates: ``[B, T, C]`` of one dtype: fp64, fp32, bf16 or fp16.
        position_bias: ``[r, C]`` in that dtype or fp32.
        compress_ratio: r, tokens of a block.
        overlapping: whether ``C = 2 D`` holds the two branches; else ``C = D``.
        cu_seqlens, cu_seqlens_k: int32 ``[N + 1]`` offsets of packed documents along T (``B`` is
            1) and along the entries, or None.
    """

    values: Tensor
    gates: Tensor
    position_bias: Tensor
    compress_ratio: int
    overlapping: bool
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None

    @property
    def head_dim(self) -> int:
        """Channels of an entry, D."""
        channels = self.values.shape[-1]
        return channels // 2 if self.overlapping else channels

    @property
    def entries(self) -> int:
        """Rows of the result: ``T // r``, spare ones included."""
        return self.values.shape[1] // self.compress_ratio

    @property
    def slots(self) -> int:
        """Tokens that an entry pools at most."""
        return self.compress_ratio * (2 if self.overlapping else 1)


class CompressorSpec(NamedTuple):
    """Frozen, hashable, picklable description of a call of ``compress_kv``.

    Attributes:
        dtype, bias_dtype: of values and gates, and of position_bias.
        device_type, capability, strides, deterministic, tracing: as in ``CallSpec``.
        batch, tokens, head_dim, compress_ratio, overlapping: as in ``CompressorCall``.
        documents: ``"none"`` or ``"cu_seqlens"``.
        needs_grad: which of values, gates and position_bias need gradients.
    """

    dtype: str = "bfloat16"
    bias_dtype: str = "float32"
    device_type: str = "cpu"
    capability: int | None = None
    batch: int = 1
    tokens: int = 4096
    head_dim: int = 512
    compress_ratio: int = 4
    overlapping: bool = True
    documents: str = "none"
    strides: str = "aligned"
    needs_grad: CompressorNeeds = (False, False, False)
    deterministic: bool = False
    tracing: bool = False

    operation = "compress_kv"

    @property
    def differentiable(self) -> bool:
        """Whether any input needs a gradient."""
        return any(self.needs_grad)


@dataclass(frozen=True)
class CompressorCapabilities(Claims):
    """Claims about ``compress_kv``: each field bounds the CompressorSpec field of its name."""

    dtype: Allowed = ANY
    bias_dtype: Allowed = ANY
    device_type: Allowed = ANY
    capability: Allowed = ANY
    batch: Allowed = ANY
    tokens: Allowed = ANY
    head_dim: Allowed = ANY
    compress_ratio: Allowed = ANY
    overlapping: Allowed = ANY
    documents: Allowed = ANY
    strides: Allowed = ANY
    deterministic: Allowed = ANY
    tracing: Allowed = ANY


def compressor_spec_of(
    call: CompressorCall, needs_grad: CompressorNeeds, *, tracing: bool = False
) -> CompressorSpec:
    """The CompressorSpec of a validated call, from its metadata alone."""
    values = call.values
    return CompressorSpec(
        dtype=str(values.dtype).removeprefix("torch."),
        bias_dtype=str(call.position_bias.dtype).removeprefix("torch."),
        device_type=values.device.type,
        capability=device_capability(values.device),
        batch=values.shape[0],
        tokens=values.shape[1],
        head_dim=call.head_dim,
        compress_ratio=call.compress_ratio,
        overlapping=call.overlapping,
        documents="none" if call.cu_seqlens is None else "cu_seqlens",
        strides=stride_class(values, call.gates),
        needs_grad=needs_grad,
        deterministic=deterministic_mode(),
        tracing=tracing,
    )


class EntryTable(NamedTuple):
    """Where the block of each of ``S`` entries lies.

    Attributes:
        first: int64 ``[S]``, the block's first token; 0 for spare rows.
        live: bool ``[S]``, False for spare rows, which hold no entry.
        has_previous: bool ``[S]``, whether a block of the same document comes before.
    """

    first: Tensor
    live: Tensor
    has_previous: Tensor


def pool_offsets(cu_seqlens: Tensor, compress_ratio: int) -> Tensor:
    """``cu_seqlens_k``: int32 ``[N + 1]`` offsets of ``length // compress_ratio`` entries each."""
    counts = cu_seqlens.diff() // compress_ratio
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def entry_table(call: CompressorCall) -> EntryTable:
    """The table of the call's entries, computed on device without a sync."""
    ratio, offsets, pool = call.compress_ratio, call.cu_seqlens, call.cu_seqlens_k
    entry = torch.arange(call.entries, device=call.values.device)
    if offsets is None or pool is None:
        return EntryTable(entry * ratio, entry >= 0, entry > 0)
    document = torch.searchsorted(pool[1:].contiguous(), entry, right=True)
    live = document < offsets.shape[0] - 1
    document = document.clamp(max=offsets.shape[0] - 2)
    within = entry - pool[document]
    first = offsets[document] + within * ratio
    # Offsets outside the tokens are a caller's mistake; no backend may read there for that.
    live &= (first >= 0) & (first + ratio <= call.values.shape[1])
    return EntryTable(torch.where(live, first, 0), live, live & (within > 0) & (first >= ratio))
