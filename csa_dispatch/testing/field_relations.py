"""Field cases whose right answer is another call's: G03, G04, G06, G16, G18, G27, G30.

One fault shows when a part of a call is run alone, a slot table is padded, poison is changed for
zeros, or memory is laid out otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .field_case import (
    TOLERANCE,
    Calls,
    FieldCase,
    Outcomes,
    agree,
    exact,
    lse_near,
    make_inputs,
    near,
    randn,
    unit,
    with_leaves,
)


def random_slots(seed: int, batch: int, tokens: int, slots: int, rows: int) -> Tensor:
    """int64 ``[B, T, K]`` slots in ``0 .. rows - 1``, repeats included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(rows, (batch, tokens, slots), generator=generator)


def batch_entry(calls: Calls, number: int):
    """One batch entry of the first call as a call of its own."""
    inputs = calls[0]
    fields = {
        name: getattr(inputs, name)[number : number + 1]
        for name in ("query", "local_kv", "sparse_kv", "kv_indices", "grad_output")
    }
    return with_leaves(inputs, **fields)


def batch_agrees(dtype: str, outcomes: Outcomes) -> Iterator[str]:
    """Messages unless the first outcome's batch entries are the others, and dsink their sum."""
    whole, *parts = outcomes
    for number, part in enumerate(parts):
        one = slice(number, number + 1)
        gradients = [
            None if gradient is None else gradient[one] for gradient in whole.gradients[:3]
        ]
        mine = whole.gradients._replace(
            query=gradients[0], local_kv=gradients[1], sparse_kv=gradients[2], attention_sink=None
        )
        other = part._replace(gradients=part.gradients._replace(attention_sink=None))
        entry = whole._replace(output=whole.output[one], lse=whole.lse[one], gradients=mine)
        yield from agree(f"batch entry {number}", dtype, entry, other)
    sinks = [part.gradients.attention_sink for part in parts]
    if whole.gradients.attention_sink is not None:
        total = sum(sink.double() for sink in sinks if sink is not None)
        found = whole.gradients.attention_sink
        yield from near("sink gradient", found, total, 2 * TOLERANCE[dtype])


def stray_scatter(dtype: str) -> Iterator[FieldCase]:
    """G03: unused slots add nothing to any row, of this batch entry or another."""

    def calls(device: torch.device) -> Calls:
        query, local, pool, sink = randn(3, (2, 2, 8, 16), (2, 1, 8, 16), (2, 1, 6, 16), (2,))
        table = random_slots(3, 2, 8, 4, 5)
        table[..., ::2] = -1
        whole = make_inputs(dtype, device, query, local, pool, table, sink, window=2)
        return (whole, *(batch_entry((whole,), number) for number in range(2)))

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        yield from batch_agrees(dtype, outcomes)
        pool = outcomes[0].gradients.sparse_kv
        assert pool is not None
        yield from exact("gradient of the row nobody selects", pool[:, :, 5], 0)

    yield FieldCase(f"G03-{dtype}", "unpredicated scatter", calls, holds)


def poison(dtype: str) -> Iterator[FieldCase]:
    """G04: what any one unselected row holds is as zeros there, in pool and window alike.

    NaN, Inf, and the largest number: finite, but its products are not.
    """
    largest = torch.finfo(getattr(torch, dtype)).max
    values = (0.0, math.nan, math.inf, -math.inf, largest, -largest)

    def calls(device: torch.device) -> Calls:
        query, local, pool, sink = randn(4, (1, 2, 4, 16), (1, 1, 4, 16), (1, 1, 4, 16), (2,))
        made = []
        for row in range(4):
            table = random_slots(4, 1, 4, 2, 3)
            table += table >= row
            for value in values:
                spoiled, stale = pool.double(), local.double()
                spoiled[:, :, row] = value
                stale[:] = value
                for window, rows in ((2, local), (0, stale)):
                    made.append(
                        make_inputs(
                            dtype, device, query, rows, spoiled, table, sink, window=window
                        )
                    )
        return tuple(made)

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        for number, outcome in enumerate(outcomes):
            row, variant = divmod(number, 2 * len(values))
            clean = outcomes[2 * len(values) * row + variant % 2]
            yield from exact("output beside poison", outcome.output, clean.output)
            yield from exact("lse beside poison", outcome.lse, clean.lse)
            yield from agree("beside poison", dtype, outcome, clean)
            pool = outcome.gradients.sparse_kv
            assert pool is not None
            yield from exact("gradient of the poisoned row", pool[:, :, row], 0)

    yield FieldCase(f"G04-{dtype}", "0 * NaN", calls, holds)


def contended_rows(dtype: str) -> Iterator[FieldCase]:
    """G06: every query selects the same rows; five runs, all right."""

    def calls(device: torch.device) -> Calls:
        query, local, pool = randn(6, (1, 4, 64, 16), (1, 1, 64, 16), (1, 1, 64, 16))
        generator = torch.Generator().manual_seed(6)
        table = torch.stack([torch.randperm(8, generator=generator) for _ in range(64)])[None]
        return (make_inputs(dtype, device, query, local, pool, table, window=0),) * 5

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        for outcome in outcomes:
            pool = outcome.gradients.sparse_kv
            assert pool is not None
            yield from exact("gradient of unselected rows", pool[:, :, 8:], 0)

    yield FieldCase(f"G06-{dtype}", "racing accumulation", calls, holds)


def head_counts(dtype: str) -> Iterator[FieldCase]:
    """G16: any number of heads; the first, a middle and the last equal one-head calls."""
    for heads in (1, 8, 16, 24, 31, 40, 64, 65, 96, 127, 128):
        chosen = sorted({0, heads // 2, heads - 1})

        def calls(device: torch.device, heads: int = heads, chosen: list[int] = chosen) -> Calls:
            made = []
            for head_dim in (16, 512) if heads in (1, 24, 65, 128) else (16,):
                query, local, pool = randn(
                    16, (1, heads, 4, head_dim), (1, 1, 4, head_dim), (1, 1, 9, head_dim)
                )
                sink = torch.linspace(-2, 2, heads)
                table = random_slots(16, 1, 4, 3, 9)
                whole = make_inputs(dtype, device, query, local, pool, table, sink, window=2)
                made.append(whole)
                assert whole.attention_sink is not None
                for head in chosen:
                    one = slice(head, head + 1)
                    made.append(
                        with_leaves(
                            whole,
                            query=whole.query[:, one],
                            grad_output=whole.grad_output[:, one],
                            attention_sink=whole.attention_sink[one],
                        )
                    )
            return tuple(made)

        def holds(_: Calls, outcomes: Outcomes, chosen: list[int] = chosen) -> Iterator[str]:
            tolerance = TOLERANCE[dtype]
            for start in range(0, len(outcomes), 1 + len(chosen)):
                whole = outcomes[start]
                for head, alone in zip(chosen, outcomes[start + 1 :], strict=False):
                    one, what = slice(head, head + 1), f"head {head}"
                    yield from near(what, whole.output[:, one], alone.output, tolerance)
                    yield from lse_near(f"lse of {what}", whole.lse[:, one], alone.lse)
                    query, sink = whole.gradients.query, whole.gradients.attention_sink
                    assert query is not None
                    assert sink is not None
                    wanted = alone.gradients
                    yield from near(
                        f"dquery of {what}", query[:, one], wanted.query, 2 * tolerance
                    )
                    yield from near(
                        f"dsink of {what}", sink[one], wanted.attention_sink, 2 * tolerance
                    )

        yield FieldCase(f"G16-H{heads}-{dtype}", "head tiling", calls, holds)


def slot_counts(dtype: str) -> Iterator[FieldCase]:
    """G18: any number of slots, and the same after padding with -1 to a multiple of 128."""
    for slots in (1, 63, 64, 65, 127, 128, 129, 192, 513):

        def calls(device: torch.device, slots: int = slots) -> Calls:
            query, local, pool = randn(18, (1, 16, 3, 64), (1, 1, 3, 64), (1, 1, 200, 64))
            table = random_slots(18, 1, 3, slots, 200)
            padded = torch.full((1, 3, -(-slots // 128) * 128), -1)
            padded[..., :slots] = table
            return tuple(
                make_inputs(dtype, device, query, local, pool, indices, window=2)
                for indices in (table, padded)
            )

        def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
            yield from agree("padded", dtype, outcomes[1], outcomes[0])

        yield FieldCase(f"G18-K{slots}-{dtype}", "slot tiling", calls, holds)


def batch_offsets(dtype: str) -> Iterator[FieldCase]:
    """G27: three batch entries equal three calls of one."""

    def calls(device: torch.device) -> Calls:
        query, local, pool, sink = randn(
            27, (3, 16, 33, 64), (3, 1, 33, 64), (3, 1, 40, 64), (16,)
        )
        table = random_slots(27, 3, 33, 20, 44)
        whole = make_inputs(dtype, device, query, local, pool, table, sink, window=5)
        return (whole, *(batch_entry((whole,), number) for number in range(3)))

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        yield from batch_agrees(dtype, outcomes)

    yield FieldCase(f"G27-{dtype}", "batch offset", calls, holds)


def index_dtypes(dtype: str) -> Iterator[FieldCase]:
    """G24: int32 and int64 slots give the same bits."""

    def calls(device: torch.device) -> Calls:
        query, local, pool, sink = randn(24, (1, 4, 9, 16), (1, 1, 9, 16), (1, 1, 7, 16), (4,))
        table = random_slots(24, 1, 9, 5, 9) - 1
        return tuple(
            make_inputs(
                dtype, device, query, local, pool, table, sink, window=3, index_dtype=width
            )
            for width in (torch.int32, torch.int64)
        )

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        yield from exact("output", outcomes[1].output, outcomes[0].output)
        yield from exact("lse", outcomes[1].lse, outcomes[0].lse)
        yield from agree("int64", dtype, outcomes[1], outcomes[0])

    yield FieldCase(f"G24-indices-{dtype}", "index dtype", calls, holds)


def far_rows(dtype: str) -> Iterator[FieldCase]:
    """G30(a): pool rows whose offset passes 2**31 elements equal their contiguous copy.

    The pool is a view over untouched memory: some gigabytes of address space, a page per row.
    """
    if dtype != "bfloat16":
        return

    def calls(device: torch.device) -> Calls:
        rows, step = 65, 2**25
        buffer = torch.empty((rows - 1) * step + 64, dtype=torch.bfloat16, device=device)
        pool = buffer.as_strided((1, 1, rows, 64), (0, 0, step, 1))
        query, local, values = randn(30, (1, 2, 4, 64), (1, 1, 4, 64), (1, 1, rows, 64))
        pool.copy_(values)
        table = torch.tensor([[[64, 0, 63], [64, 1, -1], [31, 32, 33], [64, 64, 2]]])
        near_by = make_inputs(dtype, device, query, local, values, table, unit(2), window=1)
        return near_by._replace(sparse_kv=pool.requires_grad_()), near_by

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        yield from exact("output", outcomes[0].output, outcomes[1].output)
        yield from exact("lse", outcomes[0].lse, outcomes[1].lse)
        yield from agree("far rows", dtype, outcomes[0], outcomes[1])

    yield FieldCase(f"G30a-{dtype}", "64-bit offsets", calls, holds)


FAMILIES = (
    stray_scatter,
    poison,
    contended_rows,
    head_counts,
    slot_counts,
    batch_offsets,
    index_dtypes,
    far_rows,
)
