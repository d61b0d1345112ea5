"""What a call has to do: floating-point operations and bytes, counted from its data.

Formulae: a forward has two products of ``H * D`` by its keys for each query, ``4 B T H D keys``
FLOPs; the backward five instead of two, 2.5 times as many. *Nominal* counts ``W + K`` keys for
every query, used or not, which is how published figures are counted; *used* counts the keys that
are really visible. Bytes are the least there can be: each input read once, each result written
once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from csa_dispatch.call import Call, token_bounds

PRODUCTS = {"forward": 2.0, "backward": 5.0, "both": 7.0}
"""Matrix products over all query-key pairs, by direction."""


class Pairs(NamedTuple):
    """Query-key pairs of a call, summed over batch and tokens (the heads share them)."""

    nominal: int
    used: int


class Work(NamedTuple):
    """What one direction of a call has to do.

    Attributes:
        nominal_flops, used_flops: see the module's text.
        bytes: least bytes through device memory.
    """

    nominal_flops: float
    used_flops: float
    bytes: int


def count_pairs(call: Call) -> Pairs:
    """Count pairs on the call's device. Dense-compressed calls have no unused slots to count."""
    batch, _, tokens, _ = call.query.shape
    window = call.sliding_window_size
    ramp = min(window, tokens)
    seen = batch * (ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp)
    nominal = batch * tokens * window
    if call.sparse_kv is None:
        return Pairs(nominal, seen)
    if call.kv_indices is not None:
        slots, pool = call.kv_indices, call.sparse_kv.shape[2]
        used = sum(
            int(((chunk >= 0) & (chunk < pool)).sum()) for chunk in slots.split(1 << 14, dim=1)
        )
        return Pairs(nominal + slots.numel(), seen + used)
    bounds = token_bounds(call)
    assert bounds is not None
    assert bounds.pool_start is not None
    assert bounds.pool_end is not None
    visible = int((bounds.pool_end - bounds.pool_start).sum(dtype=torch.int64))
    return Pairs(nominal + visible, seen + visible)


def work_of(call: Call, pairs: Pairs, direction: str) -> Work:
    """The work of ``"forward"``, ``"backward"`` or ``"both"``; all gradients are counted."""
    query = call.query
    flops_a_pair = 2 * PRODUCTS[direction] * query.shape[1] * query.shape[3]
    kv = call.local_kv.nbytes + (0 if call.sparse_kv is None else call.sparse_kv.nbytes)
    sink = 0 if call.attention_sink is None else call.attention_sink.nbytes
    slots = 0 if call.kv_indices is None else call.kv_indices.nbytes
    lse = query.shape[0] * query.shape[1] * query.shape[2] * (8 if query.itemsize == 8 else 4)
    forward = query.nbytes + kv + slots + sink + query.nbytes + lse
    # Reads all that the forward touched and grad_output; writes the gradients.
    backward = forward + query.nbytes + query.nbytes + kv + sink
    total = {"forward": forward, "backward": backward, "both": forward + backward}[direction]
    return Work(flops_a_pair * pairs.nominal, flops_a_pair * pairs.used, total)
