"""Context parallelism over query tokens: each rank has a contiguous part of the sequence.

A rank computes its own queries. Of KV it needs the window's rows before its first token, the
halo, which come from the left neighbour point to point, and the pool, which every rank gathers
whole: at T tokens and a compress ratio of 4 the pool is a quarter of the KV, and which of its
rows a token selects is known only there. So a rank runs one ``attention()`` call on its tokens
preceded by the halo: the halo's queries are zeros whose results are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from csa_dispatch.api import attention
from csa_dispatch.call import Call, Kind
from csa_dispatch.layouts import LAYOUTS
from csa_dispatch.prepared import Arguments, autocast_arguments, checked_call
from csa_dispatch.settings import settings
from csa_dispatch.transforms import any_autocast
from csa_dispatch.validation import fail

from .exchange import Group, Shards, agree, gather_shards, left_halo


def context_parallel_attention(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor | None = None,
    kv_indices: Tensor | None = None,
    attention_sink: Tensor | None = None,
    *,
    group: Group = None,
    sliding_window_size: int = 512,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    doc_ids: Tensor | None = None,
    compress_ratio: int | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    backend: str | None = None,
    backward_backend: str | None = None,
    check_values: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention()`` on a sequence that the ranks of ``group`` share, in equal parts in order.

    What a rank passes and gets is its part of what the whole call would pass and get. Every
    rank of the group must call it, forward and backward.

    Args:
        query, local_kv: the rank's T tokens; every rank has as many. Positions (as of rotary
            embeddings) are the caller's: the first token's is ``rank * T``.
        sparse_kv: the rank's rows of the pool; every rank has as many, so pad the end of the
            pool: rows past the last entry are never read.
        kv_indices: for the rank's tokens, into the *whole* pool (the whole span of the token's
            document, when packed).
        attention_sink: the same on every rank. Its gradient is the rank's part of a sum, as is
            every replicated parameter's.
        group: the ranks: a process group, a one-dimensional device mesh, or None for all.
        sliding_window_size: at most T + 1: the halo comes from one neighbour.
        cu_seqlens, cu_seqlens_k: offsets of the *whole* sequence and pool, the same on every
            rank. Documents may cross from rank to rank.
        doc_ids: the rank's; not with ``compress_ratio``.
        check_values: also check, by a message between the ranks, that their arguments agree in
            shapes, dtypes, requires_grad, offsets and scalars, so that every rank refuses what
            one would; otherwise ranks that disagree may wait for each other.

    The other arguments are ``attention()``'s, the same on every rank.

    Raises:
        TypeError, ValueError, BackendRefused: as ``attention()``; a window larger than a shard.
    """
    arguments = Arguments(
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        attention_sink,
        cu_seqlens,
        cu_seqlens_k,
        doc_ids,
        sliding_window_size,
        compress_ratio,
        scale,
        layout,
    )
    if type(query).__name__ == "DTensor":
        fail("query", "a DTensor", "this rank's tensor", "Pass query.to_local().", TypeError)
    if any_autocast():  # before the exchange: what is sent is what is computed with
        arguments = autocast_arguments(arguments)
    check = settings().check_values if check_values is None else check_values
    try:
        call = checked_call(arguments)
        halo = _halo(call)
    except (TypeError, ValueError) as error:
        if check:  # the others wait to hear of this rank's arguments
            agree({"error": str(error)}, Shards(group))
        raise
    shards = Shards(group)
    if check:
        agree(_metadata(call, backend, backward_backend), shards)
    local = _with_neighbours(call, halo, shards)
    results = [
        attention(
            *part[:5],
            sliding_window_size=part.sliding_window_size,
            cu_seqlens=part.cu_seqlens,
            cu_seqlens_k=part.cu_seqlens_k,
            scale=part.scale,
            doc_ids=part.doc_ids,
            compress_ratio=part.compress_ratio,
            return_lse=True,
            backend=backend,
            backward_backend=backward_backend,
            check_values=check,
        )
        for part in _parts(local)
    ]
    dropped, tokens = local.query.shape[2] - call.query.shape[2], call.query.shape[2]
    # Not narrow: its backward would fill a whole gradient before it copies into it.
    output, lse = (
        (found[0] if len(found) == 1 else torch.cat(found)).split([dropped, tokens], dim=2)[1]
        for found in zip(*results, strict=True)
    )
    order = LAYOUTS[layout]
    output = order.from_output(output)
    return (output, order.from_lse(lse)) if return_lse else output


def _halo(call: Call) -> int:
    """Rows that a token may see before its rank's first."""
    tokens, window = call.query.shape[2], call.sliding_window_size
    if window > tokens + 1:
        fail(
            "sliding_window_size",
            window,
            f"at most {tokens + 1}, one more than the {tokens} tokens of a rank",
            "Split the sequence over fewer ranks.",
        )
    if call.kind is Kind.DENSE and call.doc_ids is not None:
        fail(
            "doc_ids",
            "given with compress_ratio",
            "None then under context parallelism",
            "Pass cu_seqlens and cu_seqlens_k of the whole sequence.",
        )
    return max(window - 1, 0)


def _with_neighbours(call: Call, halo: int, shards: Shards) -> Call:
    """The rank's call on its tokens with the halo before them, and on the whole pool."""
    group = shards.group
    local_kv = left_halo(call.local_kv, halo, dim=2, group=group)
    pool, indices, ids = call.sparse_kv, call.kv_indices, call.doc_ids
    if pool is not None:
        pool = gather_shards(pool, dim=2, group=group)
    if ids is not None:
        ids = left_halo(ids, halo, dim=1, group=group)
    rows, tokens = local_kv.shape[2], call.query.shape[2]
    if indices is not None:
        indices = F.pad(indices, (0, 0, rows - tokens, 0), value=-1)
    offsets, pool_offsets = _offsets(call, pool, shards.rank * tokens - (rows - tokens), rows)
    return call._replace(
        query=_after_zeros(call.query, rows - tokens),
        local_kv=local_kv,
        sparse_kv=pool,
        kv_indices=indices,
        doc_ids=ids,
        cu_seqlens=offsets,
        cu_seqlens_k=pool_offsets,
    )


def _after_zeros(query: Tensor, count: int) -> Tensor:
    """``query`` after ``count`` rows of zeros; unlike pad's, its gradient is a view."""
    if not count:
        return query
    batch, heads, _, head_dim = query.shape
    return torch.cat((query.new_zeros(batch, heads, count, head_dim), query), dim=2)


def _offsets(
    call: Call, pool: Tensor | None, first: int, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Document offsets as seen from ``rows`` rows that begin at the sequence's row ``first``.

    A document that began earlier keeps its true, negative beginning where the compress ratio
    counts from it.
    """
    offsets, pool_offsets = call.cu_seqlens, call.cu_seqlens_k
    if offsets is None:
        if call.kind is not Kind.DENSE or first == 0:
            return None, None
        assert pool is not None
        device, entries = pool.device, pool.shape[2]
        # Two numbers each, by arange: a tensor made from a list would wait for the device.
        offsets = torch.arange(-first, rows + 1, rows + first, dtype=torch.int32, device=device)
        step = max(entries, 1)
        pool_offsets = torch.arange(2, dtype=torch.int32, device=device) * min(step, entries)
        return offsets, pool_offsets
    lowest = None if call.kind is Kind.DENSE else 0
    return (offsets - first).clamp(min=lowest, max=rows), pool_offsets


def _parts(call: Call) -> Iterator[Call]:
    """The call, or one for each batch entry where offsets stand for positions."""
    batch = call.query.shape[0]
    if call.cu_seqlens is None or batch == 1:
        yield call
        return
    for entry in range(batch):
        one = slice(entry, entry + 1)
        yield call._replace(
            query=call.query[one],
            local_kv=call.local_kv[one],
            sparse_kv=None if call.sparse_kv is None else call.sparse_kv[one],
        )


def _metadata(call: Call, backend: str | None, backward_backend: str | None) -> dict[str, object]:
    """All of a call that must be the same on every rank, offsets' values included."""
    found: dict[str, object] = {"backend": backend, "backward_backend": backward_backend}
    for name, value in call._asdict().items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        found[f"{name}'s shape"] = tuple(value.shape)
        found[f"{name}'s dtype"] = str(value.dtype)
        # Gradients go back between the ranks, or do not.
        found[f"{name}'s requires_grad"] = value.requires_grad and torch.is_grad_enabled()
        if name in ("cu_seqlens", "cu_seqlens_k"):
            found[name] = value.tolist()
    return found
