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
from csa_dispatch.transforms import any_autocast, refuse_transforms
from csa_dispatch.validation import check_flag, fail

from .exchange import Group, Shards, agree
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
    check_flag("check_values", check_values)
    check = settings().check_values if check_values is None else check_values
    try:
        call = checked_call(arguments)
        _check_shared(call)
    except (TypeError, ValueError) as error:
        if check:  # the others wait to hear of this rank's arguments
            agree({"error": str(error)}, Shards(group))
        raise
    shards = Shards(group)
    if check:
        agree(_metadata(call, backend, backward_backend), shards)
    way = _way(arguments, call, backend, backward_backend, check)
    output, lse = SharedAttention.apply(*call, shards, way)  # pyright: ignore
    order = LAYOUTS[layout]
    output = order.from_output(output)
    return (output, order.from_lse(lse)) if return_lse else output


def _way(
    arguments: Arguments,
    call: Call,
    backend: str | None,
    backward_backend: str | None,
    check: bool,
) -> Way:
    """How this rank's calls are run.

    Raises:
        TypeError, ValueError: no known backend's name.
        NotImplementedError: inside a torch.func transform that cannot apply.
    """
    if is_plain(arguments):
        return Way(needs_of(call), forced_by(backend, backward_backend), check, True)
    if not torch.compiler.is_compiling():
        refuse_transforms("context_parallel_attention")
    names = traced_choice("attention", backend, backward_backend)
    return Way(needs_of(call), Forced(*names, "argument, context or environment"), check, False)


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
