"""A guard before timing: sampled rows of what a backend computes, against the oracle.

The rows a query sees are gathered into a call of one token that selects all of them, so that the
oracle and the project's error budgets judge rows of calls that are far too large for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from csa_dispatch.call import Call, token_bounds
from csa_dispatch.testing.budgets import Target, TensorVerdict, judge
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
        last = inputs.call.query.shape[2] - 1
        self._tokens = sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})
        self._targets = _targets(inputs, self._tokens, gradients)
        # Only the last query sees the last row of the window's KV: its whole gradient.
        self._last_row = None
        if gradients and inputs.call.sliding_window_size > 0:
            self._last_row = _targets(inputs, [last], gradients)["dlocal_kv"]

    def verdicts(self, tensors: Mapping[str, Tensor | None]) -> list[TensorVerdict]:
        """Judge output, lse, the query's gradient and the last local row's, those there are."""
        found = [
            judge(self._targets[name], _pick(tensor, self._tokens))
            for name in ("output", "lse", "dquery")
            if (tensor := tensors.get(name)) is not None
        ]
        local = tensors.get("dlocal_kv")
        if local is not None and self._last_row is not None:
            found.append(judge(self._last_row, local[:1, :, -1:]))
        return found


def _targets(inputs: BenchInputs, tokens: list[int], gradients: bool) -> dict[str, Target]:
    """Targets of the given query rows, as calls of one token each."""
    grad_output = _pick(inputs.grad_output, tokens)
    return targets(_one_token_calls(inputs.call, tokens), grad_output, gradients=gradients)


def _pick(tensor: Tensor, tokens: list[int]) -> Tensor:
    """Tokens of the first batch entry as a batch: ``[R, H, 1, ...]`` of ``[B, H, T, ...]``."""
    return tensor[0, :, tokens].transpose(0, 1).unsqueeze(2)


def _one_token_calls(call: Call, tokens: list[int]) -> Call:
    """The given query rows of the first batch entry as a batch of calls of one token each.

    A token's own row of KV is its window; the other keys it sees, window and pool rows alike, are
    gathered into the pool ``[R, G, N, D]`` and selected one by one. Tokens that see fewer leave
    slots unused.
    """
    keys = [_other_keys(call, token) for token in tokens]
    most = max(1, *(rows.shape[1] for rows in keys))
    _, groups, _, head_dim = call.local_kv.shape
    pool = call.query.new_zeros(len(tokens), groups, most, head_dim)
    slots = torch.full((len(tokens), 1, most), -1, dtype=torch.int32, device=pool.device)
    for place, rows in enumerate(keys):
        count = rows.shape[1]
        pool[place, :, :count] = rows
        slots[place, 0, :count] = torch.arange(count, device=pool.device)
    return call._replace(
        query=_pick(call.query, tokens),
        local_kv=_pick(call.local_kv, tokens),
        sparse_kv=pool,
        kv_indices=slots,
        sliding_window_size=min(1, call.sliding_window_size),
        compress_ratio=None,
    )


def _other_keys(call: Call, token: int) -> Tensor:
    """All rows ``[G, N, D]`` but its own that a token of the first batch entry sees."""
    first = max(0, token + 1 - max(1, call.sliding_window_size))
    found = [call.local_kv[0, :, first:token]]
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
