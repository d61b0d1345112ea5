"""Argument checks of the lightning indexer, from metadata alone."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.size_remedies import indices_remedy
from csa_dispatch.validation import DTYPES, MAX_ROWS, MAX_SCALE, fail
from csa_dispatch.wording import cast_remedy, number_remedy, told

from .compressor_checks import check_dense, check_offsets, check_ratio, check_selection


def check_operands(index_query: Tensor, index_keys: Tensor, weights: Tensor) -> None:
    """Raise unless the three tensors fit together."""
    tensors = {"index_query": index_query, "index_keys": index_keys, "weights": weights}
    for name, tensor in tensors.items():
        check_dense(name, tensor, index_query, "index_query")
    shape = list(index_query.shape)
    if index_query.dtype not in DTYPES:
        required = "float64, float32, bfloat16 or float16"
        fail("index_query", index_query.dtype, required, "Cast it and index_keys.", TypeError)
    if len(shape) != 4 or min(shape) < 1:
        required = "[B, H, T, D] of positive sizes"
        fail("index_query", f"of shape {shape}", required, "Transpose [B, T, H, D].")
    batch, heads, tokens, head_dim = shape
    found = list(index_keys.shape)
    if len(found) != 3 or found[0] != batch or found[2] != head_dim:
        required = f"[{batch}, S, {head_dim}], shared by all heads"
        fail("index_keys", f"of shape {found}", required, "Pass keys without a head dimension.")
    if index_keys.dtype != index_query.dtype:
        required = f"of index_query's dtype, {index_query.dtype}"
        fail("index_keys", index_keys.dtype, required, "Cast one of them.")
    if list(weights.shape) != [batch, tokens, heads]:
        required = f"[{batch}, {tokens}, {heads}], one weight a token and head"
        remedy = "Pass a weight for each token and head."
        fail("weights", f"of shape {list(weights.shape)}", required, remedy)
    if weights.dtype not in (index_query.dtype, torch.float32):
        required = f"of index_query's dtype ({index_query.dtype}) or float32"
        fail("weights", weights.dtype, required, "Cast them.")
    for name, rows in (("index_query", tokens), ("index_keys", found[1])):
        if rows > MAX_ROWS:
            fail(name, f"of {rows} rows", f"at most {MAX_ROWS} rows", "Split the call.")


def check_documents(
    index_query: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> None:
    """Raise unless both offset tensors are given and fit together, or neither is."""
    offsets = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    given = {name: value for name, value in offsets.items() if value is not None}
    if not given:
        return
    for name, value in offsets.items():
        if value is None:
            fail(name, f"None with {next(iter(given))}", "given", "Pass both offset tensors.")
        check_dense(name, value, index_query, "index_query")
        check_offsets(value, index_query.shape[0], name)
    assert cu_seqlens is not None
    assert cu_seqlens_k is not None
    if cu_seqlens_k.shape != cu_seqlens.shape:
        required = f"{list(cu_seqlens.shape)}, as cu_seqlens"
        remedy = "Pass offsets of the same documents."
        fail("cu_seqlens_k", f"of shape {list(cu_seqlens_k.shape)}", required, remedy)


def check_choice(topk: int, compress_ratio: int, past: int, packed: bool) -> None:
    """Raise for bad scalars of ``lightning_indexer``."""
    check_ratio(compress_ratio)
    for name, value, least, remedy in (
        ("topk", topk, 1, "Pass the number of entries that a token selects."),
        ("past", past, 0, "Pass the number of tokens before these."),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            fail(name, told(value), "an int", number_remedy(name, value, int), TypeError)
        if not least <= value <= MAX_ROWS:
            fail(name, value, f"{least} to {MAX_ROWS}", remedy)
    if packed and past:
        fail("past", f"{past} with cu_seqlens", "0 then", "Documents are whole.")


def check_scale(scale: float | None) -> None:
    """Raise unless ``scale`` is None or a positive number."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (float, int, torch.SymFloat)):
        remedy = number_remedy("scale", scale, float)
        fail("scale", told(scale), "a float or None", remedy, TypeError)
    if not 0 < scale <= MAX_SCALE:
        fail("scale", scale, "positive and finite in float32", "None means 1/sqrt(H * D).")


def check_scored(
    kv_indices: Tensor | None, compress_ratio: int | None, index_query: Tensor
) -> None:
    """Raise unless just one says what is scored: picks of the query's tokens, or a ratio."""
    check_selection(kv_indices, compress_ratio)
    if kv_indices is None:
        return
    check_dense("kv_indices", kv_indices, index_query, "index_query")
    if kv_indices.dtype not in (torch.int32, torch.int64):
        fail("kv_indices", kv_indices.dtype, "int32 or int64", cast_remedy(kv_indices), TypeError)
    wanted = [index_query.shape[0], index_query.shape[2]]
    if kv_indices.ndim != 3 or list(kv_indices.shape[:2]) != wanted:
        required = f"[{wanted[0]}, {wanted[1]}, K], shared by all heads"
        remedy = indices_remedy(kv_indices, wanted)
        fail("kv_indices", f"of shape {list(kv_indices.shape)}", required, remedy)
