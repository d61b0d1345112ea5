"""Context parallelism over query tokens: each rank has a contiguous part of the sequence.

A rank computes its own queries. Of KV it needs the window's rows before its first token, the
halo, which come from the left neighbour point to point, and the pool, which every rank gathers
whole: at T tokens and a compress ratio of 4 the pool is a quarter of the KV, and which of its
rows a token selects is known only there. ``local_calls`` says which calls a rank makes of these,
``shared_attention`` how messages and calls follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.autograd import needs_of
from csa_dispatch.auxiliary import traced_choice
from csa_dispatch.call import Call, Kind
from csa_dispatch.forcing import Forced, forced_by
from csa_dispatch.layouts import LAYOUTS
from csa_dispatch.prepared import Arguments, autocast_arguments, checked_call, is_plain
from csa_dispatch.settings import settings
from csa_dispatch.tracing import constant_when_traced
from csa_dispatch.transforms import any_autocast, refuse_transforms
from csa_dispatch.validation import check_flag, fail

from .agreement import agree, checked_together
from .exchange import Group, Shards
from .local_calls import Way
from .shared_attention import SharedAttention


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
        sliding_window_size: at most T + 1, as the halo comes from one neighbour; any on one rank.
        cu_seqlens, cu_seqlens_k: offsets of the *whole* sequence and pool, the same on every
            rank. Documents may cross from rank to rank.
        doc_ids: the rank's; not with ``compress_ratio``.
        check_values: check values as ``attention()`` does and, by a message between the ranks,
            that their arguments agree in shapes, dtypes, requires_grad, offsets and scalars, so
            that every rank refuses what one would; otherwise ranks that disagree may wait for
            each other. Compiled code checks when it runs, where there are values to check:
            indices, offsets or ids.

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
    check_flag("return_lse", return_lse)
    check_flag("check_values", check_values)
    check = _checks_values() if check_values is None else check_values
    shards = Shards(group)
    try:
        call, way = _accepted(arguments, backend, backward_backend, shards)
    except (TypeError, ValueError) as error:
        if check and not torch.compiler.is_compiling():
            agree({"error": str(error)}, shards)  # the others wait to hear of this rank's
        raise
    if check:
        call = checked_together(call, way.needs, way.forced, shards)
    output, lse = SharedAttention.apply(*call, shards, way)  # pyright: ignore
    order = LAYOUTS[layout]
    output = order.from_output(output)
    return (output, order.from_lse(lse)) if return_lse else output


@constant_when_traced
def _checks_values() -> bool:
    return settings().check_values


def _accepted(
    arguments: Arguments, backend: str | None, backward_backend: str | None, shards: Shards
) -> tuple[Call, Way]:
    """This rank's arguments as a call, and how to run it.

    Raises:
        TypeError, ValueError: as ``attention()``; what ranks cannot share.
        NotImplementedError: inside a torch.func transform that cannot apply.
    """
    if type(arguments.query).__name__ == "DTensor":
        fail("query", "a DTensor", "this rank's tensor", "Pass query.to_local().", TypeError)
    refuse_transforms("context_parallel_attention", mapped=False)
    if any_autocast():  # before the exchange: what is sent is what is computed with
        arguments = autocast_arguments(arguments)
    call = checked_call(arguments)
    if shards.count > 1:
        _check_shared(call)
    if is_plain(arguments):
        return call, Way(needs_of(call), forced_by(backend, backward_backend), True)
    names = traced_choice("attention", backend, backward_backend)
    forced = Forced(*names, "argument, context or environment")
    return call, Way(needs_of(call), forced, False)


def _check_shared(call: Call) -> None:
    """Refuse what ranks cannot share."""
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
