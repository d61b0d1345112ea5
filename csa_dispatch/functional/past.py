"""``attention()`` for tokens that come after others: decoding and chunked prefill."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..api import attention
from ..call import begun_before
from ..layouts import LAYOUTS
from ..prepared import Arguments, autocast_arguments
from ..size_remedies import kv_remedy
from ..transforms import any_autocast
from ..validation import MAX_ROWS, fail, validate
from ..wording import number_remedy, told


def attention_with_past(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None = None,
    kv_indices: Tensor | None = None,
    attention_sink: Tensor | None = None,
    *,
    past: int,
    sliding_window_size: int,
    compress_ratio: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """``attention()`` whose queries are the last ``T`` tokens of a longer sequence.

    Equal to the last rows of ``attention()`` over the whole sequence, without computing the
    others. Few tokens read their window as gathered rows, so one token costs one row of work;
    of the entries only the picks are copied where those are less than half.

    More than twice as many tokens as there are window rows before them, with ``kv_indices`` more
    than six times, run with the window of ``attention()`` itself, their queries padded in front
    by those rows. There every complete entry stays a span of the pool, of a document that began
    before row 0: one call for each row of the batch.

    Args:
        query: ``[B, H, T, D]``, the queries of tokens ``past`` to ``past + T - 1``.
        local_kv: ``[B, G, P + T, D]``: rows of the last ``P`` tokens before the queries, then the
            queries' own. ``P`` is at least ``min(past, sliding_window_size - 1)``.
        sparse_kv: ``[B, G, S, D]``, every entry that is complete by now, or None.
        kv_indices: ``[B, T, K]``, as for ``attention()``.
        attention_sink: ``[H]``.
        past: tokens before the first query; what ``compress_ratio`` counts from.
        sliding_window_size, compress_ratio, scale: as for ``attention()``.

    Returns:
        ``[B, H, T, D]``.

    Raises:
        TypeError, ValueError: as ``attention()``; or ``past`` is no int of 0 or more, or
            ``local_kv`` holds fewer rows than the window needs.
    """
    arguments = Arguments(
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        attention_sink,
        None,
        None,
        None,
        sliding_window_size,
        compress_ratio,
        scale,
        "BHSD",
    )
    if any_autocast():
        arguments = autocast_arguments(arguments)
        query, local_kv, sparse_kv = arguments[:3]
    _check(arguments, past)
    before, tokens = local_kv.shape[2] - query.shape[2], query.shape[2]
    needed = min(past, max(sliding_window_size, 1) - 1)
    # Rows further back than any query's window would be padded or copied for nothing.
    before, local_kv = needed, local_kv[:, :, before - needed :]
    # Zeros before fewer tokens cost more than gathering their windows; where picks are gathered
    # anyway, that costs least.
    if tokens > (2 if kv_indices is None else 6) * before:
        call = (query, local_kv, sparse_kv, kv_indices, attention_sink)
        return _padded(*call, past, sliding_window_size, compress_ratio, scale)
    if sparse_kv is not None and kv_indices is None and compress_ratio is not None:
        kv_indices = complete_entries(query, sparse_kv.shape[2], past, compress_ratio)
    rows, pool = window_rows(query, before, sliding_window_size), local_kv
    if sparse_kv is not None and kv_indices is not None:
        unused = (kv_indices < 0) | (kv_indices >= sparse_kv.shape[2])
        kv_indices = torch.where(unused, 0, kv_indices)
        if 2 * tokens * kv_indices.shape[2] < sparse_kv.shape[2]:
            sparse_kv, kv_indices = _picked(sparse_kv, kv_indices)
        picks = torch.where(unused, -1, kv_indices + local_kv.shape[2])
        rows = torch.cat((rows, picks.to(rows.dtype)), dim=-1)
        pool = torch.cat((local_kv, sparse_kv), dim=2)
    return attention(
        query,
        local_kv[:, :, before:],
        pool,
        rows,
        attention_sink,
        sliding_window_size=0,
        scale=scale,
    )


def _picked(sparse_kv: Tensor, kv_indices: Tensor) -> tuple[Tensor, Tensor]:
    """The picked rows alone, ``[B, G, T * K, D]``, and their slots there."""
    batch = torch.arange(sparse_kv.shape[0], device=sparse_kv.device)[:, None]
    rows = sparse_kv.transpose(1, 2)[batch, kv_indices.flatten(1)].transpose(1, 2)
    slots = torch.arange(rows.shape[2], device=rows.device, dtype=kv_indices.dtype)
    return rows, slots.view(kv_indices.shape[1:])


def _padded(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None,
    kv_indices: Tensor | None,
    attention_sink: Tensor | None,
    past: int,
    window: int,
    compress_ratio: int | None,
    scale: float | None,
) -> Tensor:
    """``attention()`` with a query of zeros for each row of ``local_kv`` before the queries'."""
    before = local_kv.shape[2] - query.shape[2]
    first = past - before  # token of row 0
    if before:
        query = pad(query, (0, 0, before, 0))
        kv_indices = None if kv_indices is None else pad(kv_indices, (0, 0, before, 0), value=-1)

    offsets = offsets_k = None
    rows = [slice(None)]
    if sparse_kv is not None and kv_indices is None and first:
        offsets, offsets_k = begun_before(first, query, sparse_kv)
        rows = [slice(row, row + 1) for row in range(query.shape[0])]
    outputs = [
        attention(
            query[row],
            local_kv[row],
            None if sparse_kv is None else sparse_kv[row],
            None if kv_indices is None else kv_indices[row],
            attention_sink,
            sliding_window_size=window,
            cu_seqlens=offsets,
            cu_seqlens_k=offsets_k,
            compress_ratio=compress_ratio,
            scale=scale,
        )
        for row in rows
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[:, :, before:]


def _check(arguments: Arguments, past: int) -> None:
    """Raise for bad arguments before their parts are put together."""
    if isinstance(past, bool) or not isinstance(past, (int, torch.SymInt)):
        fail("past", told(past), "an int", number_remedy("past", past, int), TypeError)
    if not 0 <= past <= MAX_ROWS:
        fail("past", past, f"0 to {MAX_ROWS}", "Pass the number of tokens before these.")
    query, local_kv, window = arguments.query, arguments.local_kv, arguments.sliding_window_size
    before, own = 0, local_kv
    if all(isinstance(x, Tensor) and x.ndim == 4 and not x.is_nested for x in (query, local_kv)):
        most = MAX_ROWS - query.shape[2]
        if past > most:
            fail("past", past, f"0 to {most}", f"Tokens are counted up to {MAX_ROWS}.")
        before = local_kv.shape[2] - query.shape[2]
        if min(query.shape) > 0:
            _check_rows(query, local_kv)
        if before > 0:
            own = local_kv[:, :, before:]
    validate(
        query,
        own,
        arguments.sparse_kv,
        arguments.kv_indices,
        arguments.attention_sink,
        window,
        None,
        None,
        arguments.scale,
        None,
        arguments.compress_ratio,
        "BHSD",
    )
    needed = min(past, max(window, 1) - 1)
    if before < needed:
        fail(
            "local_kv",
            f"of {before} rows before the queries' own",
            f"of {needed}",
            f"That is the window of {window} after {past} tokens.",
        )


def _check_rows(query: Tensor, local_kv: Tensor) -> None:
    """Raise unless the sizes fit; of the rows before the queries' own validate() sees none."""
    batch, _, tokens, head_dim = query.shape
    found = list(local_kv.shape)
    if found[0] == batch and found[2] >= tokens and found[3] == head_dim:
        return
    if found[2] < tokens and found[0] == batch and found[3] == head_dim:
        remedy = "Pass rows of earlier tokens and the queries' own, of dimensions in this order."
    else:
        order = LAYOUTS["BHSD"]
        remedy = kv_remedy("local_kv", local_kv, query, order, order.kv_dims, past=True)
    fail(
        "local_kv",
        f"of shape {found}",
        f"[{batch}, G, P + {tokens}, {head_dim}] ([B, G, P + T, D]) to match query "
        f"{list(query.shape)}",
        remedy,
    )


def complete_entries(query: Tensor, entries: int, past: int, compress_ratio: int) -> Tensor:
    """Indices of every entry that is complete at each query, int32 ``[B, T, S]``, -1 unused."""
    token = torch.arange(past + 1, past + 1 + query.shape[2], device=query.device)[:, None]
    entry = torch.arange(entries, device=query.device, dtype=torch.int32)
    table = torch.where(entry < token // compress_ratio, entry, -1)
    return table.expand(query.shape[0], -1, -1)


def window_rows(query: Tensor, before: int, window: int) -> Tensor:
    """Rows of ``local_kv`` in each query's window, int32 ``[B, T, W]``, -1 unused.

    Query t's own row is ``before + t``; rows before row 0 are not there.
    """
    width = min(window, before + query.shape[2])
    own = torch.arange(before, before + query.shape[2], device=query.device, dtype=torch.int32)
    offset = torch.arange(width, device=query.device, dtype=torch.int32)
    rows = own[:, None] - (width - 1) + offset
    return rows.clamp(min=-1).expand(query.shape[0], -1, -1)
