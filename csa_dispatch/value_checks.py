"""Value checks for debugging: offsets, ids and index ranges, read on the host (a sync)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .call import Call
from .validation import fail


def check_values(call: Call, rank: int = 0, ranks: int = 1) -> None:
    """Check what metadata cannot show; reads device memory on the host.

    Stricter than the operation: an index at or past its pool is legal (an unused slot) but is
    reported here, since padding is better written as -1 and such values are mostly mistakes.

    Args:
        call: the ``rank``-th of ``ranks`` equal parts of a sequence and its pool, in order;
            its offsets and indices are the whole sequence's.
        rank: 0 or more.
        ranks: more than ``rank``.

    Raises:
        ValueError: offsets that start past 0, decrease or end past their tensor; doc_ids
            that decrease; an index past its document's pool.
    """
    tokens = call.query.shape[2]
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2] * ranks
    for name, offsets, rows in (
        ("cu_seqlens", call.cu_seqlens, tokens * ranks),
        ("cu_seqlens_k", call.cu_seqlens_k, pool),
    ):
        if offsets is not None:
            _check_offsets(name, offsets, rows)
    if call.doc_ids is not None:
        decreasing = (call.doc_ids[:, 1:] < call.doc_ids[:, :-1]).nonzero()
        if decreasing.numel():
            batch, token = decreasing[0].tolist()
            fail(
                "doc_ids",
                f"decreasing at [{batch}, {token + 1}]",
                "non-decreasing along T",
                "Number the documents in the order of their tokens.",
            )
    if call.kv_indices is not None:
        _check_indices(call, call.kv_indices, pool, rank * tokens)


def _check_offsets(name: str, offsets: Tensor, rows: int) -> None:
    values = offsets.tolist()
    if values[0] > 0 or (values[0] < 0 and name == "cu_seqlens_k"):
        begun = ", or less for a document that began before row 0" if name == "cu_seqlens" else ""
        remedy = "Begin with 0, then the end of each document."
        fail(name, f"{values[0]} at its start", f"0 there{begun}", remedy)
    for position, (before, after) in enumerate(pairwise(values)):
        if after < before:
            remedy = "Pass the cumulative sum of the documents' lengths."
            fail(name, f"{before}, {after} at {position}", "non-decreasing", remedy)
    if values[-1] > rows:
        required = f"at most the {rows} rows it partitions"
        remedy = "Check the lengths of the documents, and that layout fits the tensors."
        fail(name, f"{values[-1]} at its end", required, remedy)


def _check_indices(call: Call, kv_indices: Tensor, pool: int, first: int) -> None:
    limit: Tensor | int = pool
    if call.cu_seqlens is not None and call.cu_seqlens_k is not None:
        position = first + torch.arange(call.query.shape[2], device=kv_indices.device)
        document = torch.searchsorted(call.cu_seqlens[1:].contiguous(), position, right=True)
        lengths = call.cu_seqlens_k.diff()
        spare = document >= lengths.shape[0]
        length = lengths[document.clamp(max=lengths.shape[0] - 1)]
        # Rows past the last document have no contract.
        limit = torch.where(spare, torch.iinfo(torch.int32).max, length)[None, :, None]
    bad = (kv_indices >= limit).nonzero()
    if bad.numel():
        batch, token, slot = bad[0].tolist()
        value = int(kv_indices[batch, token, slot])
        length = limit if isinstance(limit, int) else int(limit[0, token, 0])
        fail(
            "kv_indices",
            f"{value} at [{batch}, {token}, {slot}]",
            f"under {length}, the rows of its document's pool, or -1",
            "Write unused slots as -1.",
        )
