"""Argument checks: from metadata alone, in the caller's layout, before anything runs.

Every failure is one TypeError or ValueError that names the argument, what it is, what it must
be and what to do. Nothing here reads tensor data, so it holds under tracing too.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .layouts import LAYOUTS, Layout
from .size_remedies import indices_remedy, kv_remedy, query_remedy, rank_remedy, sink_remedy
from .tracing import constant_when_traced
from .wording import as_text, cast_remedy, number_remedy, quoted, told

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 2**31 - 1
MAX_SCALE = torch.finfo(torch.float32).max


def fail(
    argument: str, actual: object, required: str, remedy: str, error: type = ValueError
) -> NoReturn:
    """Raise ``error`` in the house form: argument, actual, required, remedy."""
    raise error(f"{argument} is {as_text(actual)}; it must be {required}. {remedy}")


def check_strided(argument: str, value: object) -> None:
    """Refuse what is no tensor with memory of its own to read by strides.

    Raises:
        TypeError, ValueError: it names the argument.
    """
    if not isinstance(value, Tensor):
        fail(argument, type(value).__name__, "a torch.Tensor", "Convert it first.", TypeError)
    if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
        fail(argument, "an uninitialised parameter", "materialised", "Run its module once first.")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else f"of layout {value.layout}"
        fail(argument, kind, "a dense (strided) tensor", "Make it dense first.")


def check_flag(argument: str, value: object) -> None:
    """Refuse what is neither a bool nor None.

    Raises:
        TypeError: it names the argument.
    """
    if value is not None and not isinstance(value, bool):
        fail(argument, told(value), "a bool or None", "Pass True or False.", TypeError)


def validate(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None,
    kv_indices: Tensor | None,
    attention_sink: Tensor | None,
    sliding_window_size: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    doc_ids: Tensor | None,
    compress_ratio: int | None,
    layout: str,
) -> None:
    """Check one call's arguments; see ``csa_dispatch.attention`` for what each must be.

    Raises:
        TypeError: a wrong Python type or tensor dtype class.
        ValueError: a wrong size, dtype pairing, device, value or combination.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        remedy = "BHSD, the default, is a query of [batch, heads, tokens, head_dim]."
        fail("layout", quoted(layout), f"one of {', '.join(LAYOUTS)}", remedy)
    order = LAYOUTS[layout]
    _scalars(sliding_window_size, scale, compress_ratio)
    optional = {
        "sparse_kv": sparse_kv,
        "kv_indices": kv_indices,
        "attention_sink": attention_sink,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "doc_ids": doc_ids,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {"query": query, "local_kv": local_kv, **given}.items():
        check_strided(name, value)
    distributed = is_dtensor(query)
    for name, value in {"local_kv": local_kv, **given}.items():
        if is_dtensor(value) != distributed:
            _mixed(name, value, distributed)
        if value.device != query.device:
            remedy = f"Pass {name}.to(query.device)."
            if value.is_meta:  # it has no values to move
                remedy = "Make it on query's device."
            fail(name, f"on {value.device}", f"on query's device, {query.device}", remedy)

    _kind(sparse_kv, kv_indices, compress_ratio)
    sizes = _query(query, order)
    groups = _kv("local_kv", local_kv, query, order, {**sizes, "S": sizes["T"]})
    if sparse_kv is not None:
        sizes["S"] = _size(sparse_kv, order, "S")
        pool_groups = _kv("sparse_kv", sparse_kv, query, order, sizes)
        if pool_groups != groups:
            remedy = "Repeat the heads of the one that has fewer."
            fail("sparse_kv", f"of {pool_groups} KV heads", f"of {groups}, as local_kv", remedy)
    if kv_indices is not None:
        _kv_indices(kv_indices, order, sizes)
    if attention_sink is not None:
        _attention_sink(attention_sink, query, sizes["H"])
    _documents(cu_seqlens, cu_seqlens_k, doc_ids, sparse_kv, order, sizes)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return type(tensor).__name__ == "DTensor"  # its import would cost every program


@constant_when_traced
def _implicit_replication() -> bool:
    """Whether torch's ``implicit_replication()`` takes plain tensors for replicated ones."""
    from torch.distributed.tensor import DTensor

    return getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False)


def _mixed(name: str, value: Tensor, distributed: bool) -> None:
    """Refuse ``value``, of which only one of it and the query is a DTensor."""
    if not distributed:
        whole = f"distribute_tensor(query, {name}.device_mesh, [Replicate()])"
        remedy = f"Pass {name}.to_local(), or {whole}."
        fail(name, "a DTensor", "a plain tensor, as query is", remedy, TypeError)
    if not _implicit_replication():
        whole = f"distribute_tensor({name}, query.device_mesh, [Replicate()])"
        remedy = f"Pass {whole}, with a Replicate() for each dimension of the mesh."
        fail(name, f"a plain {type(value).__name__}", "a DTensor, as query is", remedy, TypeError)


def _scalars(sliding_window_size: int, scale: float | None, compress_ratio: int | None) -> None:
    window = sliding_window_size
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
        remedy = number_remedy("sliding_window_size", window, int)
        fail("sliding_window_size", told(window), "an int", remedy, TypeError)
    if window < 0:
        remedy = "For a window over all tokens pass their number."
        fail("sliding_window_size", window, "0 (no window) or more", remedy)
    if window > sys.maxsize:
        fail(
            "sliding_window_size",
            window,
            f"at most {sys.maxsize}",
            "The number of tokens sees them all.",
        )
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (float, int, torch.SymFloat)):
            remedy = number_remedy("scale", scale, float)
            fail("scale", told(scale), "a float or None", remedy, TypeError)
        if not 0 < scale <= MAX_SCALE:
            fail("scale", scale, "positive and finite in float32", "None means 1/sqrt(head_dim).")
    if compress_ratio is not None:
        ratio = compress_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, torch.SymInt)):
            remedy = number_remedy("compress_ratio", ratio, int)
            fail("compress_ratio", told(ratio), "an int or None", remedy, TypeError)
        if ratio < 1:
            remedy = "For a layer without compression drop it and sparse_kv."
            fail("compress_ratio", ratio, "1 or more tokens per pool entry", remedy)
        if ratio > MAX_ROWS:
            remedy = "Drop it and sparse_kv: no pool entry is complete then."
            required = f"at most {MAX_ROWS} tokens per pool entry"
            fail("compress_ratio", ratio, required, remedy)


def _kind(sparse_kv: Tensor | None, kv_indices: Tensor | None, compress_ratio: int | None) -> None:
    if sparse_kv is None:
        for name, value in (("kv_indices", kv_indices), ("compress_ratio", compress_ratio)):
            if value is not None:
                remedy = f"Pass sparse_kv too, or drop {name}."
                fail(name, "given without sparse_kv", "None then", remedy)
    elif kv_indices is None and compress_ratio is None:
        fail(
            "kv_indices",
            "None with sparse_kv",
            "given unless compress_ratio is",
            "compress_ratio selects every causally complete pool entry.",
        )
    elif kv_indices is not None and compress_ratio is not None:
        fail(
            "compress_ratio",
            f"{compress_ratio} with kv_indices",
            "None when kv_indices are given",
            "Drop kv_indices to select every complete pool entry, or else compress_ratio.",
        )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _query(query: Tensor, order: Layout) -> dict[str, int]:
    if query.ndim != len(order.query_dims):
        remedy = query_remedy(query, order)
        fail("query", f"of shape {_shape(query)}", _letters(order.query_dims), remedy)
    if query.dtype not in DTYPES:
        remedy = "Cast it and the KV to bfloat16, say."
        required = "float64, float32, bfloat16 or float16"
        fail("query", query.dtype, required, remedy, TypeError)
    sizes = {"B": 1, **dict(zip(order.query_dims, query.shape, strict=True))}
    for letter in order.query_dims:
        if sizes[letter] < 1:
            remedy = "Leave the call out: it has nothing to compute."
            fail("query", f"of shape {_shape(query)}", "of positive sizes", remedy)
    if sizes["T"] > MAX_ROWS:
        remedy = "Split the tokens over ranks with context_parallel_attention()."
        fail("query", f"of {sizes['T']} tokens", f"of at most {MAX_ROWS}", remedy)
    return sizes


def _letters(dims: str) -> str:
    return f"of shape [{', '.join(dims)}]"


def _kv_dims(kv: Tensor, order: Layout) -> str | None:
    if kv.ndim == len(order.kv_dims):
        return order.kv_dims
    if order.shared_kv_dims is not None and kv.ndim == len(order.shared_kv_dims):
        return order.shared_kv_dims
    return None


def _size(kv: Tensor, order: Layout, letter: str) -> int:
    dims = _kv_dims(kv, order)
    return kv.shape[dims.index(letter)] if dims is not None else 0


def _kv(name: str, kv: Tensor, query: Tensor, order: Layout, sizes: dict[str, int]) -> int:
    """Check local_kv or sparse_kv and return its number of heads, G."""
    dims = _kv_dims(kv, order)
    if dims is None:
        wanted = _letters(order.kv_dims)
        if order.shared_kv_dims is not None:
            wanted += f" or {_letters(order.shared_kv_dims)}"
        if name == "local_kv":
            wanted = wanted.replace("S", "T")
        remedy = rank_remedy(name, kv, order, sizes)
        fail(name, f"of shape {_shape(kv)}", wanted, remedy)
    if kv.dtype != query.dtype:
        fail(name, kv.dtype, f"of query's dtype, {query.dtype}", "Cast one of them.")
    for letter, size in zip(dims, kv.shape, strict=True):
        if letter != "G" and size != sizes[letter]:
            required = [f"{sizes[other]}" if other != "G" else "G" for other in dims]
            meaning = ", ".join(dims.replace("S", "T") if name == "local_kv" else dims)
            fail(
                name,
                f"of shape {_shape(kv)}",
                f"[{', '.join(required)}] ([{meaning}]) to match query {_shape(query)}",
                kv_remedy(name, kv, query, order, dims),
            )
    if sizes["S"] > MAX_ROWS:
        remedy = "Split the call, each part with the pool of its own documents."
        fail(name, f"of {sizes['S']} rows", f"of at most {MAX_ROWS}", remedy)
    groups = kv.shape[dims.index("G")] if "G" in dims else 1
    heads = sizes["H"]
    if groups < 1 or heads % groups:
        remedy = "Pass one shared head, or check that layout is the order of its dimensions."
        required = f"of a number that divides query's {heads} heads"
        fail(name, f"of {groups} KV heads", required, remedy)
    return groups


def _kv_indices(kv_indices: Tensor, order: Layout, sizes: dict[str, int]) -> None:
    if kv_indices.dtype not in (torch.int32, torch.int64):
        fail("kv_indices", kv_indices.dtype, "int32 or int64", cast_remedy(kv_indices), TypeError)
    wanted = [sizes[letter] for letter in order.token_dims]
    if kv_indices.ndim != len(wanted) + 1 or list(kv_indices.shape[:-1]) != wanted:
        sizes_wanted = ", ".join([f"{size}" for size in wanted])
        shape = f"[{sizes_wanted}, K]"
        remedy = indices_remedy(kv_indices, wanted)
        required = f"{shape}, shared by all heads"
        fail("kv_indices", f"of shape {_shape(kv_indices)}", required, remedy)


def _attention_sink(attention_sink: Tensor, query: Tensor, heads: int) -> None:
    if attention_sink.dtype not in (query.dtype, torch.float32):
        required = f"of query's dtype ({query.dtype}) or float32"
        remedy = "Pass attention_sink.float()."
        fail("attention_sink", attention_sink.dtype, required, remedy)
    if attention_sink.ndim != 1 or attention_sink.shape[0] != heads:
        fail(
            "attention_sink",
            f"of shape {_shape(attention_sink)}",
            f"[{heads}], one logit per query head of this call",
            sink_remedy(attention_sink, heads),
        )


def _documents(
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    doc_ids: Tensor | None,
    sparse_kv: Tensor | None,
    order: Layout,
    sizes: dict[str, int],
) -> None:
    if doc_ids is not None:
        if cu_seqlens is not None or cu_seqlens_k is not None:
            offsets = "cu_seqlens_k" if cu_seqlens is None else "cu_seqlens"
            fail("doc_ids", f"given with {offsets}", "None then", "Pass one of the two.")
        if doc_ids.dtype not in (torch.int32, torch.int64):
            fail("doc_ids", doc_ids.dtype, "int32 or int64", "Cast it.", TypeError)
        wanted = [sizes[letter] for letter in order.token_dims]
        if list(doc_ids.shape) != wanted:
            remedy = "Repeat each document's id for each of its tokens."
            required = f"{wanted}, one id per token"
            fail("doc_ids", f"of shape {_shape(doc_ids)}", required, remedy)
        return
    if cu_seqlens is None and cu_seqlens_k is None:
        return
    if cu_seqlens is None:
        fail("cu_seqlens", "None with cu_seqlens_k", "given", "Pass both offset tensors.")
    if cu_seqlens_k is None and sparse_kv is not None:
        fail("cu_seqlens_k", "None with cu_seqlens", "given", "Pass both offset tensors.")
    if sizes["B"] != 1:
        fail(
            "cu_seqlens",
            f"given with batch size {sizes['B']}",
            "used with batch size 1",
            "Pack the batch along the tokens, or use doc_ids.",
        )
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            continue
        if offsets.dtype != torch.int32:
            fail(name, offsets.dtype, "int32", "Cast it.", TypeError)
        if offsets.ndim != 1 or offsets.shape[0] < 2:
            required = "[N + 1], N documents of at least 1"
            remedy = "Pass 0 and the end of each document."
            fail(name, f"of shape {_shape(offsets)}", required, remedy)
    if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens.shape:
        fail(
            "cu_seqlens_k",
            f"of shape {_shape(cu_seqlens_k)}",
            f"{_shape(cu_seqlens)}, the documents of cu_seqlens",
            "For a document without pool entries repeat the offset before it.",
        )
