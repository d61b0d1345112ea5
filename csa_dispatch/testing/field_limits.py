"""Field cases at the edges of sizes and magnitudes, answered by hand: G15, G17, G19, G20."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .field_case import (
    TOLERANCE,
    Calls,
    FieldCase,
    Outcomes,
    exact,
    lse_near,
    make_inputs,
    near,
    unit,
)


def window_edges(dtype: str) -> Iterator[FieldCase]:
    """G15: a window of W holds the query's own row and the W - 1 before it that exist."""
    many = [(6, window) for window in (0, 1, 2, 3, 5, 6, 7, 1000, 2**31)]
    sizes = many + [(1, window) for window in (0, 1, 9)]

    def calls(device: torch.device) -> Calls:
        made = []
        for tokens, window in sizes:
            rows = torch.arange(tokens).double()[:, None].expand(1, 1, tokens, 4)
            made.append(make_inputs(dtype, device, 0 * rows, rows, window=window))
        return tuple(made)

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        for (tokens, window), outcome in zip(sizes, outcomes, strict=True):
            token = torch.arange(tokens).double()
            first = (token - window + 1).clamp(min=0)
            wanted = (first + token) / 2 if window else 0 * token
            yield from near(f"W={window}", outcome.output, wanted[:, None], TOLERANCE[dtype])
            count = (token - first + 1).log() if window else torch.full((tokens,), -math.inf)
            yield from lse_near(f"lse at W={window}", outcome.lse, count)

    yield FieldCase(f"G15-{dtype}", "window edge", calls, holds)


def last_column(dtype: str) -> Iterator[FieldCase]:
    """G17: every head dim up to its last column, and nothing past a power of two."""
    dims = (8, 40, 80, 96, 192, 256, 512, 576)

    def calls(device: torch.device) -> Calls:
        made = []
        for head_dim in dims:
            row = math.sqrt(head_dim) * unit(1, 1, 1, head_dim, at=head_dim - 1)
            made.append(make_inputs(dtype, device, row, row, window=1))
        return tuple(made)

    def holds(calls: Calls, outcomes: Outcomes) -> Iterator[str]:
        for head_dim, inputs, outcome in zip(dims, calls, outcomes, strict=True):
            stored = inputs.query.detach().double()[..., -1].item()
            logit = stored**2 / math.sqrt(head_dim)
            yield from lse_near(f"lse at D={head_dim}", outcome.lse, logit)
            yield from exact(f"D={head_dim}", outcome.output, inputs.local_kv.detach())

    yield FieldCase(f"G17-{dtype}", "head_dim padding", calls, holds)


def large_products(dtype: str) -> Iterator[FieldCase]:
    """G19: dot products of 102400, past fp16's largest, between inputs and results that fit."""

    def calls(device: torch.device) -> Calls:
        rows = torch.full((1, 1, 1, 64), 40.0)
        table = torch.zeros(1, 1, 0)
        return (
            make_inputs(dtype, device, rows, rows, rows, table, window=1, grad_output=rows),
            make_inputs(
                dtype, device, rows, rows, rows, [[[0, 0, -1]]], window=0, grad_output=rows
            ),
        )

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        tolerance = TOLERANCE[dtype]
        for label, outcome, keys in (("window", outcomes[0], 1), ("pool", outcomes[1], 2)):
            gradients = outcome.gradients
            yield from near(f"{label} output", outcome.output, 40.0, tolerance)
            lse = 12800 + math.log(keys)
            yield from lse_near(f"{label} lse", outcome.lse, lse, 2e-3)
            yield from near(f"{label} dquery", gradients.query, 0.0, 2 * tolerance * 12800)
            kv = gradients.local_kv if keys == 1 else gradients.sparse_kv
            # An lse of 12800 in fp32 is half of 1e-3 off, and so is exp(score - lse).
            yield from near(f"{label} dkv", kv, 40.0, max(2 * tolerance, 1e-3))

    yield FieldCase(f"G19-{dtype}", "fp32 intermediates", calls, holds)


def large_logits(dtype: str) -> Iterator[FieldCase]:
    """G20: logits of 10000, where an lse in fp32 is a thousandth off.

    Keys ``(100, t / 4, t)`` and ``(100, t / 2, t)`` against ``(100, 1, 0)``.
    """
    if dtype == "bfloat16":
        return
    slopes = (0.25, 0.5)

    def calls(device: torch.device) -> Calls:
        made = []
        for slope in slopes:
            token = torch.arange(4).double()
            query, rows = torch.zeros(1, 1, 4, 8).double(), torch.zeros(1, 1, 4, 8).double()
            query[..., 0], query[..., 1] = 100, 1
            rows[..., 0], rows[..., 1], rows[..., 2] = 100, slope * token, token
            made.append(make_inputs(dtype, device, query, rows, window=4, scale=1.0))
        return tuple(made)

    def holds(_: Calls, outcomes: Outcomes) -> Iterator[str]:
        lse = [10000, 10000.826, 10001.369, 10001.800]
        yield from lse_near("lse", outcomes[0].lse, lse, 2e-3)
        means = torch.tensor([0, 0.56218, 1.16495, 1.80710]).double()
        yield from near("column 2", outcomes[0].output[0, 0, :, 2], means, 1e-2 / 1.8)
        for slope, outcome in zip(slopes, outcomes, strict=True):
            seen = torch.tensor([[-math.inf if j > t else slope * j for j in range(4)]
                                 for t in range(4)]).double()  # fmt: skip
            weights = seen.softmax(-1) @ torch.arange(4).double()
            column = outcome.output[0, 0, :, 2]
            yield from near(f"column 2 at slope {slope}", column, weights, 1e-2)
            for gradient in outcome.gradients:
                if gradient is not None and not gradient.isfinite().all():
                    yield "a gradient is not finite"

    yield FieldCase(f"G20-{dtype}", "large logits", calls, holds)


FAMILIES = (window_edges, last_column, large_products, large_logits)
