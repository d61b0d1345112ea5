"""Field cases of slots, sinks and scale, answered by hand: G01, G02, G05, G07 to G12, G14."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .field_case import (
    TOLERANCE,
    Calls,
    FieldCase,
    Outcomes,
    exact,
    lse_near,
    make_inputs,
    near,
    randn,
    unit,
)


def ramp_pool(rows: int, head_dim: int = 4) -> Tensor:
    """Pool row ``j`` is ``(j + 1) e0``."""
    return unit(1, 1, rows, head_dim) * torch.arange(1, rows + 1)[:, None]


def scattered_slots(dtype: str) -> Iterator[FieldCase]:
    """G01: two used slots at every pair of places, in both orders, -1 elsewhere."""
    table = []
    for places in itertools.permutations(range(5), 2):
        row = [-1] * 5
        row[places[0]], row[places[1]] = 3, 0
        table.append(row)
    tokens = len(table)

    def calls(device: torch.device) -> Calls:
        query = 2 * unit(1, 1, tokens, 4)
        return (
            make_inputs(
                dtype, device, query, torch.zeros(query.shape), ramp_pool(4), [table],
                window=0, scale=0.25,
            ),
        )  # fmt: skip

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        out, lse, gradients = outcomes[0]
        yield from near("output", out[..., 0], 3.452723, TOLERANCE[dtype])
        yield from exact("other columns", out[..., 1:], 0)
        yield from lse_near("lse", lse, 2.201413)
        assert gradients.sparse_kv is not None
        yield from exact("gradient of unselected rows", gradients.sparse_kv[:, :, 1:3], 0)

    yield FieldCase(f"G01-{dtype}", "validity judged by column, not by value", calls, holds)


def filler_slots(dtype: str) -> Iterator[FieldCase]:
    """G02: one used slot, at every place, among filler out of range on both sides.

    As int64 the filler includes values that turn valid when cut to 32 bits.
    """
    narrow = [1, 4, 5, 2147480000, -2, -(2**31)]
    wide = [1, 2**32 + 2, -(2**32), 2**40, -(2**63), 2**63 - 1]
    for index_dtype, slots in ((torch.int32, narrow), (torch.int64, wide)):
        table = [slots[shift:] + slots[:shift] for shift in range(6)]

        def calls(
            device: torch.device, table: list = table, index_dtype: torch.dtype = index_dtype
        ) -> Calls:
            query = 2 * unit(1, 1, 6, 4)
            return (
                make_inputs(
                    dtype, device, query, torch.zeros(query.shape), ramp_pool(4), [table],
                    window=0, scale=0.25, index_dtype=index_dtype,
                ),
            )  # fmt: skip

        def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
            out, lse, gradients = outcomes[0]
            yield from near("output", out, 2 * unit(1, 1, 6, 4), TOLERANCE[dtype])
            yield from lse_near("lse", lse, 1.0)
            assert gradients.sparse_kv is not None
            yield from exact("gradient of other rows", gradients.sparse_kv[:, :, [0, 2, 3]], 0)
            if not gradients.sparse_kv[:, :, 1].any():
                yield "gradient of the selected row is 0"

        width = str(index_dtype).removeprefix("torch.")
        yield FieldCase(f"G02-{width}-{dtype}", "missing bound, fwd and bwd", calls, holds)


def repeated_slots(dtype: str) -> Iterator[FieldCase]:
    """G05: repeats weigh as often as they occur, forward and backward."""

    def calls(device: torch.device) -> Calls:
        query, local, pool, grad = randn(
            77, (1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 4, 4), (1, 1, 3, 4)
        )
        table = [[[0, 0, 1], [2, 2, 2], [1, 3, 3]]]
        return (make_inputs(dtype, device, query, local, pool, table, window=0, grad_output=grad),)

    def holds(calls: Calls, outcomes: Outcomes) -> Iterator[str]:
        inputs, (out, lse, gradients) = calls[0], outcomes[0]
        assert inputs.sparse_kv is not None
        assert gradients.sparse_kv is not None
        query, pool = inputs.query.detach().double(), inputs.sparse_kv.detach().double()
        logit = (query[0, 0, 1] * pool[0, 0, 2]).sum() / 2
        yield from near("row 1", out[0, 0, 1], pool[0, 0, 2], TOLERANCE[dtype])
        yield from lse_near("lse of row 1", lse[0, 0, 1], logit + math.log(3))
        yield from near(
            "its gradient",
            gradients.sparse_kv[0, 0, 2],
            inputs.grad_output[0, 0, 1].double(),
            2 * TOLERANCE[dtype],
        )

    yield FieldCase(f"G05-{dtype}", "multiplicity", calls, holds)


def degenerate_sizes(dtype: str) -> Iterator[FieldCase]:
    """G07: no window, no slots, no pool rows, nothing used; with a sink and without."""
    # window, pool rows, the slots of a row, and whether rows see any key
    shapes = {
        "a": (0, 6, [], True),
        "b": (0, 6, [-1, -1, -1], True),
        "c": (2, 0, [], False),
        "d": (2, 0, [0, 0], False),
    }
    for (label, (window, rows, slots, empty)), sink in itertools.product(
        shapes.items(), ([0.5, -1.0], None)
    ):

        def calls(
            device: torch.device,
            window: int = window,
            rows: int = rows,
            slots: list = slots,
            sink: list | None = sink,
        ) -> Calls:
            query, local, pool = randn(7, (1, 2, 5, 8), (1, 1, 5, 8), (1, 1, rows, 8))
            table = torch.tensor([[slots] * 5]).reshape(1, 5, len(slots))
            return (make_inputs(dtype, device, query, local, pool, table, sink, window=window),)

        def holds(
            calls: Calls, outcomes: Outcomes, empty: bool = empty, sink: list | None = sink
        ) -> Iterator[str]:
            out, lse, gradients = outcomes[0]
            assert calls[0].sparse_kv is not None
            pool = gradients.sparse_kv
            if pool is None or pool.shape != calls[0].sparse_kv.shape:
                yield f"gradient of sparse_kv is {None if pool is None else tuple(pool.shape)}"
            if empty:
                yield from exact("output", out, 0)
                logit = [[-math.inf], [-math.inf]] if sink is None else [[x] for x in sink]
                yield from exact("lse", lse, torch.tensor(logit, dtype=lse.dtype)[None])
                for gradient in gradients:
                    if gradient is not None:
                        yield from exact("gradients", gradient, 0)

        name = f"G07{label}-{'no sink' if sink is None else 'sink'}-{dtype}"
        yield FieldCase(name, "degenerate rows and sizes", calls, holds)


def natural_lse(dtype: str) -> Iterator[FieldCase]:
    """G08: lse is a natural logarithm, of window and pool keys alike."""

    def calls(device: torch.device) -> Calls:
        one = {"dtype": dtype, "device": device, "query": 3 * unit(1, 1, 1, 4), "scale": 1.0}
        key, growing = 2 * unit(1, 1, 1, 4), torch.ones(1, 1, 6, 4)
        return (
            make_inputs(**one, local_kv=key, window=1),
            make_inputs(**one, local_kv=key, sparse_kv=key, kv_indices=[[[0]]], window=1),
            make_inputs(dtype, device, 0 * growing, growing, sink=[0.0], window=6),
        )

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        yield from lse_near("one key", outcomes[0].lse, 6.0)
        yield from lse_near("twice that key", outcomes[1].lse, 6.693147)
        seen = torch.arange(1, 7).double()
        yield from lse_near("growing window", outcomes[2].lse, torch.log(seen + 1))
        growing = (seen / (seen + 1))[:, None]
        yield from near("growing window", outcomes[2].output, growing, TOLERANCE[dtype])

    yield FieldCase(f"G08-{dtype}", "lse base", calls, holds)


def sink_in_lse(dtype: str) -> Iterator[FieldCase]:
    """G09 and G10: output, lse and sink gradient of one key of logit 0 and a sink of ln 3."""

    def calls(device: torch.device) -> Calls:
        query = torch.zeros(1, 1, 1, 4)
        return (
            make_inputs(
                dtype, device, query, query + 1, sink=[math.log(3)], window=1,
                grad_output=unit(1, 1, 1, 4),
            ),
        )  # fmt: skip

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        out, lse, gradients = outcomes[0]
        yield from near("output", out, 0.25, TOLERANCE[dtype])
        yield from lse_near("lse", lse, math.log(4))
        yield from near("sink gradient", gradients.attention_sink, -0.1875, 2 * TOLERANCE[dtype])

    yield FieldCase(f"G09-G10-{dtype}", "lse definition, sink gradient", calls, holds)


def extreme_sinks(dtype: str) -> Iterator[FieldCase]:
    """G11: sinks of -inf, -1e4, 100, 1e4, +inf as five heads, with one key and without."""
    logits = torch.tensor([-math.inf, -1e4, 100.0, 1e4, math.inf]).double()

    def calls(device: torch.device) -> Calls:
        query = torch.zeros(1, 5, 1, 4)
        key = torch.ones(1, 1, 1, 4)
        return tuple(
            make_inputs(dtype, device, query, key, sink=logits, window=window) for window in (1, 0)
        )

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        seen, blind = outcomes
        alone = torch.tensor([0, 0, 100, 1e4, math.inf])
        yield from lse_near("lse", seen.lse[0, :, 0], alone, 1e-3)
        outputs = torch.tensor([1.0, 1, 0, 0, 0])[:, None]
        yield from near("output", seen.output[0, :, 0], outputs, TOLERANCE[dtype])
        yield from exact("output of +inf", seen.output[0, 4], 0)
        dsink = seen.gradients.attention_sink
        assert dsink is not None
        yield from exact("gradient of infinite sinks", dsink[[0, 4]], 0)
        yield from exact("output without keys", blind.output, 0)
        yield from exact("lse without keys", blind.lse[0, :, 0], logits)
        for gradient in (*seen.gradients, *blind.gradients):
            if gradient is not None and not gradient.isfinite().all():
                yield "a gradient is not finite"

    yield FieldCase(f"G11-{dtype}", "softmax stability", calls, holds)


def exact_sink(dtype: str) -> Iterator[FieldCase]:
    """G12: an fp32 sink keeps its precision beside low-precision data."""

    def calls(device: torch.device) -> Calls:
        query = torch.ones(1, 1, 1, 8)
        return (make_inputs(dtype, device, query, query, sink=[10.03], window=0),)

    def holds(calls: Calls, outcomes: Outcomes) -> Iterator[str]:
        out, lse, gradients = outcomes[0]
        yield from lse_near("lse", lse, 10.03, 1e-5)
        assert gradients.attention_sink is not None
        assert calls[0].attention_sink is not None
        found = (out.dtype, lse.dtype, tuple(lse.shape), gradients.attention_sink.dtype)
        fine = torch.float64 if dtype == "float64" else torch.float32
        wanted = (getattr(torch, dtype), fine, (1, 1, 1), calls[0].attention_sink.dtype)
        if found != wanted:
            yield f"dtypes and lse shape are {found}, must be {wanted}"

    yield FieldCase(f"G12-{dtype}", "mixed precision", calls, holds)


def scale_spares_the_sink(dtype: str) -> Iterator[FieldCase]:
    """G14: the scale multiplies logits alone, and None is ``head_dim ** -0.5``."""

    def calls(device: torch.device) -> Calls:
        query, key = 2 * unit(1, 1, 1, 4), unit(1, 1, 1, 4)
        wide, wide_key = randn(14, (1, 2, 5, 80), (1, 1, 5, 80))
        return (
            make_inputs(dtype, device, query, key, sink=[1.0], window=1, scale=0.25),
            make_inputs(dtype, device, wide, wide_key, window=3),
            make_inputs(dtype, device, wide, wide_key, window=3, scale=80**-0.5),
        )

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        yield from lse_near("lse", outcomes[0].lse, 1.474077)
        yield from exact("default scale", outcomes[1].output, outcomes[2].output)
        yield from exact("lse at the default scale", outcomes[1].lse, outcomes[2].lse)

    yield FieldCase(f"G14-{dtype}", "scale", calls, holds)


FAMILIES = (
    scattered_slots,
    filler_slots,
    repeated_slots,
    degenerate_sizes,
    natural_lse,
    sink_in_lse,
    extreme_sinks,
    exact_sink,
    scale_spares_the_sink,
)
