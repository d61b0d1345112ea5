"""A guard before timing: sampled rows of what a backend computes, against the oracle.

The rows a query sees are gathered into a call of one token that selects all of them, so that the
oracle and the project's error budgets judge rows of calls that are far too large for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from csa_dispatch.call import Call, token_bounds
from csa_dispatch.testing.budgets import TensorVerdict, judge
from csa_dispatch.testing.targets import targets

from .inputs import BenchInputs

_ROWS = 4
_CHECKED_AT_ONCE = 1 << 28


class SampledRows:
    """Query rows of one call, evenly spread over its tokens, and what must come of them.

    Args:
        inputs: the call and its upstream gradient.
        gradients: whether the query's gradient is wanted too.
    """

    def __init__(self, inputs: BenchInputs, *, gradients: bool) -> None:
        tokens = inputs.call.query.shape[2]
        self._tokens = sorted({round(i * (tokens - 1) / (_ROWS - 1)) for i in range(_ROWS)})
        grad_output = self._pick(inputs.grad_output)
        self._targets = targets(
            _one_token_calls(inputs.call, self._tokens), grad_output, gradients=gradients
        )

    def verdicts(self, tensors: Mapping[str, Tensor | None]) -> list[TensorVerdict]:
        """Judge output, lse and the query's gradient, those that are there."""
        return [
            judge(self._targets[name], self._pick(tensor))
            for name in ("output", "lse", "dquery")
            if (tensor := tensors.get(name)) is not None
        ]

    def _pick(self, tensor: Tensor) -> Tensor:
        """The sampled tokens of the first batch entry as a batch: ``[R, H, 1, ...]``."""
        return tensor[0, :, self._tokens].transpose(0, 1).unsqueeze(2)


def _one_token_calls(call: Call, tokens: list[int]) -> Call:
    """The given query rows of the first batch entry as a batch of calls of one token each.

    Their keys, window and pool rows alike, are gathered into the pool ``[R, G, N, D]`` and
    selected one by one; rows with fewer than ``N`` keys leave the other slots unused.
    """
    keys = [_visible_keys(call, token) for token in tokens]
    most = max(1, *(rows.shape[1] for rows in keys))
    _, heads, _, head_dim = call.query.shape
    groups = call.local_kv.shape[1]
    pool = call.query.new_zeros(len(tokens), groups, most, head_dim)
    slots = torch.full((len(tokens), 1, most), -1, dtype=torch.int32, device=pool.device)
    for place, rows in enumerate(keys):
        count = rows.shape[1]
        pool[place, :, :count] = rows
        slots[place, 0, :count] = torch.arange(count, device=pool.device)
    return call._replace(
        query=call.query[0, :, tokens].transpose(0, 1).reshape(-1, heads, 1, head_dim),
        local_kv=call.query.new_zeros(len(tokens), groups, 1, head_dim),
        sparse_kv=pool,
        kv_indices=slots,
        sliding_window_size=0,
        compress_ratio=None,
    )


def _visible_keys(call: Call, token: int) -> Tensor:
    """All rows ``[G, N, D]`` that a token of the first batch entry sees."""
    first = max(0, token + 1 - call.sliding_window_size)
    found = [call.local_kv[0, :, first : token + 1]]
    if call.sparse_kv is not None and call.kv_indices is not None:
        slots = call.kv_indices[0, token]
        used = (slots >= 0) & (slots < call.sparse_kv.shape[2])
        found.append(call.sparse_kv[0][:, slots[used]])
    elif call.sparse_kv is not None:
        bounds = token_bounds(call)
        assert bounds is not None
        assert bounds.pool_end is not None
        found.append(call.sparse_kv[0, :, : int(bounds.pool_end[0, token])])
    return torch.cat(found, dim=1)


def not_finite(named: Mapping[str, Tensor | None]) -> list[str]:
    """Which tensors hold NaN or Inf anywhere, in words."""
    found = []
    for name, tensor in named.items():
        if tensor is None:
            continue
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)
        bad = sum(int((~part.isfinite()).sum()) for part in flat.split(_CHECKED_AT_ONCE))
        if bad:
            found.append(f"{name} has {bad} of {tensor.numel()} elements NaN or Inf")
    return found
