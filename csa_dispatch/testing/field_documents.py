"""Field cases of packed documents: G10 (packed), G21, G22, G23."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .field_case import (
    TOLERANCE,
    Calls,
    FieldCase,
    Outcomes,
    agree,
    document,
    document_agrees,
    exact,
    make_inputs,
    near,
    randn,
    with_leaves,
)
from .field_relations import random_slots


def packed_inputs(
    dtype: str,
    device: torch.device,
    seed: int,
    *,
    heads: int,
    lengths: list[int],
    pool_lengths: list[int],
    window: int,
    spare: int = 0,
):
    """A packed call of D=16 and K=2 with fp32 sinks; slots valid, just past, or -1."""
    tokens, rows = sum(lengths) + spare, sum(pool_lengths)
    query, local, pool, sink = randn(
        seed, (1, heads, tokens, 16), (1, 1, tokens, 16), (1, 1, rows, 16), (heads,)
    )
    return make_inputs(
        dtype, device, query, local, pool, random_slots(seed, 1, tokens, 2, 4) - 1, sink,
        window=window, cu_seqlens=_offsets(lengths), cu_seqlens_k=_offsets(pool_lengths),
    )  # fmt: skip


def _offsets(lengths: list[int]) -> list[int]:
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def _sink_sum(dtype: str, whole: Tensor | None, parts: Outcomes) -> Iterator[str]:
    sinks = [part.gradients.attention_sink for part in parts]
    total = sum(sink.double() for sink in sinks if sink is not None)
    yield from near("sink gradient", whole, total, 2 * TOLERANCE[dtype])


def packed_sink(dtype: str) -> Iterator[FieldCase]:
    """G10: the sink gradient of a packed call is the sum over its documents run alone."""

    def calls(device: torch.device) -> Calls:
        whole = packed_inputs(
            dtype, device, 10, heads=3, lengths=[2, 5], pool_lengths=[3, 1], window=2
        )
        return whole, document(whole, 0), document(whole, 1)

    def holds(calls: Calls, outcomes: Outcomes) -> Iterator[str]:
        whole, *alone = outcomes
        yield from _sink_sum(dtype, whole.gradients.attention_sink, tuple(alone))
        for number, part in enumerate(alone):
            yield from document_agrees(f"document {number}", dtype, calls[0], whole, number, part)

    yield FieldCase(f"G10-packed-{dtype}", "sink gradient", calls, holds)


def window_stops(dtype: str) -> Iterator[FieldCase]:
    """G21: the window stops at its document's start; other documents change nothing.

    The boundary stands early, midway and late; the window is short or longer than all.
    """
    for cut, window, ids in [
        (4, 3, False),
        (1, 3, False),
        (8, 2, False),
        (4, 100, False),
        (4, 3, True),
    ]:

        def calls(
            device: torch.device, cut: int = cut, window: int = window, ids: bool = ids
        ) -> Calls:
            rows, pool = randn(1, (1, 1, 9, 4), (1, 1, 5, 4))
            first = make_inputs(
                dtype, device, rows, rows, pool, torch.full((1, 9, 1), -1), window=window,
                cu_seqlens=[0, cut, 9], cu_seqlens_k=[0, 2, 5],
            )  # fmt: skip
            if ids:
                named = (torch.arange(9, device=device) >= cut).int()[None]
                first = first._replace(cu_seqlens=None, cu_seqlens_k=None, doc_ids=named)
            other = {}
            for name in ("query", "local_kv"):
                other[name] = getattr(first, name).detach().clone()
                other[name][:, :, :cut] *= -3
            return first, with_leaves(first, **other)

        def holds(calls: Calls, outcomes: Outcomes, cut: int = cut) -> Iterator[str]:
            one, other = outcomes
            own = calls[0].local_kv.detach()[:, :, cut]
            yield from exact("first row of document 1", one.output[:, :, cut], own)
            for name, mine, theirs in (
                ("output", one.output, other.output),
                ("lse", one.lse, other.lse),
            ):
                yield from exact(f"{name} of document 1", mine[:, :, cut:], theirs[:, :, cut:])
            for mine, theirs in zip(one.gradients[:2], other.gradients[:2], strict=True):
                assert mine is not None
                assert theirs is not None
                yield from near(
                    "gradients of document 1", mine[:, :, cut:], theirs[:, :, cut:],
                    2 * TOLERANCE[dtype],
                )  # fmt: skip

        name = f"G21-{'doc_ids-' * ids}cut{cut}-W{window}-{dtype}"
        yield FieldCase(name, "document isolation", calls, holds)


def empty_documents(dtype: str) -> Iterator[FieldCase]:
    """G22: an empty document, anywhere, is as if it were not there."""
    full = [(5, 2), (7, 3)]
    for place in range(3):

        def calls(device: torch.device, place: int = place) -> Calls:
            made = []
            for sizes in (full, [*full[:place], (0, 0), *full[place:]]):
                made.append(
                    packed_inputs(
                        dtype, device, 22, heads=4, window=3,
                        lengths=[length for length, _ in sizes],
                        pool_lengths=[length for _, length in sizes],
                    )
                )  # fmt: skip
            return (*made, document(made[0], 0), document(made[0], 1))

        def holds(calls: Calls, outcomes: Outcomes) -> Iterator[str]:
            without, within, *alone = outcomes
            yield from agree("with an empty document", dtype, within, without)
            for number, part in enumerate(alone):
                yield from document_agrees(
                    f"document {number}", dtype, calls[0], without, number, part
                )

        yield FieldCase(f"G22-place{place}-{dtype}", "empty documents", calls, holds)


def spare_rows(dtype: str) -> Iterator[FieldCase]:
    """G23: rows past the last offset, whatever they hold, add nothing to any reduction."""

    def calls(device: torch.device) -> Calls:
        whole = packed_inputs(
            dtype, device, 23, heads=4, lengths=[3, 6], pool_lengths=[2, 4], window=3, spare=3
        )
        grad = whole.grad_output.clone()
        grad[:, :, 9:] = 0
        whole = whole._replace(grad_output=grad)
        assert whole.kv_indices is not None
        used = {
            name: getattr(whole, name)[:, :, :9] for name in ("query", "local_kv", "grad_output")
        }
        return whole, with_leaves(whole, **used, kv_indices=whole.kv_indices[:, :9])

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        whole, wanted = outcomes
        for what, found in (
            ("dquery", whole.gradients.query),
            ("dlocal", whole.gradients.local_kv),
        ):
            assert found is not None
            yield from exact(f"{what} of spare rows", found[:, :, 9:], 0)
        query, local, pool, sink = whole.gradients
        assert query is not None
        assert local is not None
        gradients = whole.gradients._replace(
            query=query[:, :, :9], local_kv=local[:, :, :9], sparse_kv=pool, attention_sink=sink
        )
        used = whole._replace(
            output=whole.output[:, :, :9], lse=whole.lse[:, :, :9], gradients=gradients
        )
        yield from agree("used rows", dtype, used, wanted)

    yield FieldCase(f"G23-{dtype}", "spare capacity", calls, holds)


FAMILIES = (packed_sink, window_stops, empty_documents, spare_rows)
