"""Argument checks of the indexer's loss, from metadata alone."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.size_remedies import indices_remedy
from csa_dispatch.validation import DTYPES, MAX_SCALE, fail
from csa_dispatch.wording import cast_remedy, number_remedy, quoted, told

from .compressor_checks import check_dense, check_offsets, check_selection

REDUCTIONS = ("mean", "sum", "none")
_SCORES = "Pass what indexer_scores gives for the same arguments."


def check_indexer_loss(
    index_scores: Tensor,
    query: Tensor,
    sparse_kv: Tensor,
    kv_indices: Tensor | None,
    lse: Tensor | None,
    window_lse: Tensor | None,
    compress_ratio: int | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    reduction: str,
) -> None:
    """Raise for bad arguments of ``indexer_kl_loss``."""
    if reduction not in REDUCTIONS:
        remedy = "The default is 'mean'."
        fail("reduction", quoted(reduction), f"one of {', '.join(REDUCTIONS)}", remedy)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (float, int))):
        remedy = number_remedy("scale", scale, float)
        fail("scale", told(scale), "a float or None", remedy, TypeError)
    if scale is not None and not 0 < scale <= MAX_SCALE:
        fail("scale", scale, "positive and finite in float32", "None means 1/sqrt(head_dim).")
    if (lse is None) == (window_lse is None):
        actual = "None without window_lse" if lse is None else "given with window_lse"
        required = "given then" if lse is None else "None then"
        fail("lse", actual, required, "Pass lse or window_lse, whichever the layer has.")
    check_selection(kv_indices, compress_ratio)
    tensors = {
        "index_scores": index_scores,
        "query": query,
        "sparse_kv": sparse_kv,
        "kv_indices": kv_indices,
        "lse": lse,
        "window_lse": window_lse,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
    }
    for name, tensor in tensors.items():
        if tensor is None and name not in ("index_scores", "query", "sparse_kv"):
            continue
        check_dense(name, tensor, index_scores, "index_scores")
    _check_shapes(index_scores, query, sparse_kv, kv_indices)
    _check_lse("lse" if window_lse is None else "window_lse", lse, window_lse, query)
    _check_documents(cu_seqlens, cu_seqlens_k, query.shape[0])


def _check_shapes(
    index_scores: Tensor, query: Tensor, sparse_kv: Tensor, kv_indices: Tensor | None
) -> None:
    if query.dtype not in DTYPES:
        required = "float64, float32, bfloat16 or float16"
        fail("query", query.dtype, required, "Pass attention()'s own.", TypeError)
    if query.ndim != 4 or min(query.shape) < 1:
        required = "[B, H, T, D] of positive sizes"
        fail("query", f"of shape {list(query.shape)}", required, "Transpose other layouts.")
    batch, _, tokens, size = query.shape
    shape = list(sparse_kv.shape)
    pool = shape[-2] if len(shape) > 2 else 0
    if shape not in ([batch, 1, pool, size], [batch, pool, size]):
        required = f"[{batch}, 1, S, {size}] or [{batch}, S, {size}], one shared head"
        fail("sparse_kv", f"of shape {shape}", required, "Pass attention()'s own.")
    if sparse_kv.dtype != query.dtype:
        fail("sparse_kv", sparse_kv.dtype, f"of query's dtype, {query.dtype}", "Cast one of them.")
    columns = pool
    if kv_indices is not None:
        if kv_indices.dtype not in (torch.int32, torch.int64):
            fail(
                "kv_indices",
                kv_indices.dtype,
                "int32 or int64",
                cast_remedy(kv_indices),
                TypeError,
            )
        if kv_indices.ndim != 3 or list(kv_indices.shape[:2]) != [batch, tokens]:
            actual, required = f"of shape {list(kv_indices.shape)}", f"[{batch}, {tokens}, K]"
            remedy = indices_remedy(kv_indices, [batch, tokens])
            fail("kv_indices", actual, required, remedy)
        columns = kv_indices.shape[2]
    if not index_scores.dtype.is_floating_point:
        fail("index_scores", index_scores.dtype, "of a floating-point dtype", _SCORES, TypeError)
    if list(index_scores.shape) != [batch, tokens, columns]:
        fail(
            "index_scores",
            f"of shape {list(index_scores.shape)}",
            f"[{batch}, {tokens}, {columns}], a score for each "
            + ("entry" if kv_indices is None else "slot of kv_indices"),
            _SCORES,
        )


def _check_lse(name: str, lse: Tensor | None, window_lse: Tensor | None, query: Tensor) -> None:
    value = window_lse if lse is None else lse
    assert value is not None
    wanted = torch.float64 if query.dtype == torch.float64 else torch.float32
    if value.dtype != wanted:
        required = f"{wanted}, as attention() returns it"
        fail(name, value.dtype, required, "Cast it back.", TypeError)
    if value.shape != query.shape[:3]:
        required = f"[B, H, T], {list(query.shape[:3])}"
        fail(name, f"of shape {list(value.shape)}", required, "Pass that of this query.")


def _check_documents(cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, batch: int) -> None:
    if (cu_seqlens is None) != (cu_seqlens_k is None):
        name = "cu_seqlens" if cu_seqlens is None else "cu_seqlens_k"
        fail(name, "None", "given with the other offsets", "Pass both offset tensors.")
    if cu_seqlens is None or cu_seqlens_k is None:
        return
    check_offsets(cu_seqlens, batch)
    check_offsets(cu_seqlens_k, batch, "cu_seqlens_k")
    if cu_seqlens.shape != cu_seqlens_k.shape:
        required = f"{list(cu_seqlens.shape)}, the documents of cu_seqlens"
        remedy = "Pass offsets of the same documents."
        fail("cu_seqlens_k", f"of shape {list(cu_seqlens_k.shape)}", required, remedy)
