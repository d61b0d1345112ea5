"""Argument checks of the compressor, from metadata alone."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.validation import DTYPES, MAX_ROWS, check_strided, fail, is_dtensor
from csa_dispatch.wording import number_remedy, told

OVERLAPPING_RATIO = 4
"""The ratio that V4 pools with two overlapping branches."""


def check_ratio(compress_ratio: int) -> None:
    """Raise unless ``compress_ratio`` is a positive int that kernels can hold."""
    if isinstance(compress_ratio, bool) or not isinstance(compress_ratio, int):
        remedy = number_remedy("compress_ratio", compress_ratio, int)
        fail("compress_ratio", told(compress_ratio), "an int", remedy, TypeError)
    if not 1 <= compress_ratio <= MAX_ROWS:
        required = f"1 to {MAX_ROWS} tokens an entry"
        fail("compress_ratio", compress_ratio, required, "V4 has 4 and 128.")


def check_selection(kv_indices: Tensor | None, compress_ratio: int | None) -> None:
    """Raise unless one of the two says which entries count: picks, or every complete one."""
    if kv_indices is None and compress_ratio is None:
        remedy = "compress_ratio takes every complete entry."
        fail("kv_indices", "None without compress_ratio", "given then", remedy)
    if kv_indices is not None and compress_ratio is not None:
        remedy = "Drop kv_indices to take every complete entry, or else compress_ratio."
        fail("kv_indices", "given with compress_ratio", "None then", remedy)
    if compress_ratio is not None:
        check_ratio(compress_ratio)


def check_dense(name: str, tensor: Tensor | None, first: Tensor, of: str) -> None:
    """Raise unless ``tensor`` is a dense one on the device of ``first``, the argument ``of``."""
    check_strided(name, tensor)
    assert tensor is not None
    if is_dtensor(tensor):
        remedy = f"Pass {name}.to_local(), split by batch or whole."
        fail(name, "a DTensor", "this rank's tensor", remedy, TypeError)
    if tensor.device != first.device:
        required = f"on the device of {of}, {first.device}"
        # Meta tensors have no values to move.
        remedy = "Make it there." if tensor.is_meta else "Move one of them."
        fail(name, f"on {tensor.device}", required, remedy)


def check_compressor(
    values: Tensor,
    gates: Tensor,
    position_bias: Tensor,
    compress_ratio: int,
    overlapping: bool | None,
    cu_seqlens: Tensor | None,
    least_tokens: int = 1,
) -> bool:
    """Raise for bad arguments of ``compress_kv``; whether the form is the overlapping one."""
    check_ratio(compress_ratio)
    if overlapping is None:
        overlapping = compress_ratio == OVERLAPPING_RATIO
    if not isinstance(overlapping, bool):
        fail("overlapping", told(overlapping), "a bool or None", "Pass True or False.", TypeError)
    tensors = {"values": values, "gates": gates, "position_bias": position_bias}
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens
    for name, tensor in tensors.items():
        check_dense(name, tensor, values, "values")
    if values.dtype not in DTYPES:
        required = "float64, float32, bfloat16 or float16"
        fail("values", values.dtype, required, "Cast values and gates.", TypeError)
    if values.ndim != 3 or 0 in values.shape[::2] or values.shape[1] < least_tokens:
        required = "[B, T, C] of positive sizes"
        fail("values", f"of shape {list(values.shape)}", required, "Pass [1, T, C] for one row.")
    channels = values.shape[2]
    if overlapping and channels % 2:
        fail(
            "values",
            f"of {channels} channels",
            "of an even number: branch a, then branch b",
            "Pass overlapping=False for the plain form.",
        )
    if gates.shape != values.shape:
        required = f"of values' shape, {list(values.shape)}"
        fail("gates", f"of shape {list(gates.shape)}", required, "Pass a gate for each value.")
    if gates.dtype != values.dtype:
        fail("gates", gates.dtype, f"of values' dtype, {values.dtype}", "Cast one of them.")
    if list(position_bias.shape) != [compress_ratio, channels]:
        required = f"[{compress_ratio}, {channels}], the ratio and values' channels"
        remedy = "Pass the bias of this compressor, or another compress_ratio."
        fail("position_bias", f"of shape {list(position_bias.shape)}", required, remedy)
    if position_bias.dtype not in (values.dtype, torch.float32):
        required = f"of values' dtype ({values.dtype}) or float32"
        fail("position_bias", position_bias.dtype, required, "Cast it.")
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, values.shape[0])
    return overlapping


def check_offsets(offsets: Tensor, batch: int, name: str = "cu_seqlens") -> None:
    """Raise unless ``offsets`` can be the documents of one packed row."""
    if batch != 1:
        fail(
            name,
            f"given with batch size {batch}",
            "used with batch size 1",
            "Pack the batch along the tokens.",
        )
    if offsets.dtype != torch.int32:
        fail(name, offsets.dtype, "int32", "Cast it.", TypeError)
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        required = "[N + 1], N documents of at least 1"
        fail(name, f"of shape {list(offsets.shape)}", required, "Pass 0 and each one's end.")
