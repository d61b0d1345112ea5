"""``compress_kv_step``: the pooling of ``compress_kv`` while tokens arrive, as in decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.validation import fail
from csa_dispatch.wording import a_kind

from .compressor import compress_kv
from .compressor_checks import check_compressor, check_dense

_REMEDY = "Pass the last step's state."


class CompressorState(NamedTuple):
    """What later entries need of the tokens so far. Never written to: keep one to go back to it.

    Attributes:
        values, gates: ``[B, p, C]``, the ``p < r`` tokens of the partial block.
        previous_values, previous_gates: ``[B, r, D]``, branch a of the last complete block;
            None before there is one, and always in the plain form.
    """

    values: Tensor
    gates: Tensor
    previous_values: Tensor | None = None
    previous_gates: Tensor | None = None


def compress_kv_step(
    values: Tensor,
    gates: Tensor,
    state: CompressorState | None,
    position_bias: Tensor,
    compress_ratio: int,
    *,
    overlapping: bool | None = None,
) -> tuple[Tensor, CompressorState]:
    """Pool the blocks that the next tokens complete.

    Steps over a sequence, of any numbers of tokens, give exactly the entries that
    ``compress_kv`` gives of the whole, in order. Differentiable, through the state too.

    Args:
        values, gates: ``[B, t, C]``, the next ``t`` tokens of every row, none too; see
            ``compress_kv``.
        state: what the step before returned; None at the start of the sequence.
        position_bias, compress_ratio, overlapping: as for ``compress_kv``.

    Returns:
        Entries ``[B, n, D]``, ``n = (p + t) // r`` with the ``p`` tokens of the state's partial
        block (0 entries when none is complete), and the state for the next step.

    Raises:
        TypeError, ValueError: as ``compress_kv``.
    """
    overlapping = check_compressor(
        values, gates, position_bias, compress_ratio, overlapping, None, least_tokens=0
    )
    previous = None
    if state is not None:
        _check_state(state, values, compress_ratio, overlapping)
        values = torch.cat((state.values, values), 1)
        gates = torch.cat((state.gates, gates), 1)
        if state.previous_values is not None and state.previous_gates is not None:
            previous = state.previous_values, state.previous_gates
    size = values.shape[2] // (2 if overlapping else 1)
    complete = values.shape[1] - values.shape[1] % compress_ratio
    # Copies: a view would keep all of a long prefill alive.
    rest = values[:, complete:].clone(), gates[:, complete:].clone()
    if not complete:
        entries = values.new_empty(values.shape[0], 0, size)
        return entries, CompressorState(*rest, *(previous or (None, None)))

    values, gates = values[:, :complete], gates[:, :complete]
    last = slice(complete - compress_ratio, complete)
    branch_a = values[:, last, :size].clone(), gates[:, last, :size].clone()
    if previous is not None:
        # The block before again, for its branch a; its own entry is not wanted.
        values = torch.cat((_both_branches(previous[0]), values), 1)
        gates = torch.cat((_both_branches(previous[1]), gates), 1)
    entries = compress_kv(
        values, gates, position_bias, compress_ratio, overlapping=overlapping
    ).entries
    if previous is not None:
        entries = entries[:, 1:]
    return entries, CompressorState(*rest, *(branch_a if overlapping else (None, None)))


def _both_branches(branch_a: Tensor) -> Tensor:
    return torch.cat((branch_a, torch.zeros_like(branch_a)), 2)


def _check_state(
    state: CompressorState, values: Tensor, compress_ratio: int, overlapping: bool
) -> None:
    if not isinstance(state, CompressorState):
        fail("state", a_kind(state), "a CompressorState or None", _REMEDY, TypeError)
    if (state.previous_values is None) != (state.previous_gates is None):
        name = "previous_values" if state.previous_values is None else "previous_gates"
        fail(f"state.{name}", "None", "given with the other", _REMEDY)
    for name, tensor in state._asdict().items():
        if tensor is None:
            if name in ("values", "gates"):
                fail(f"state.{name}", "None", "given", _REMEDY, TypeError)
            continue
        check_dense(f"state.{name}", tensor, values, "values")
        if tensor.dtype != values.dtype:
            required = f"of values' dtype, {values.dtype}"
            fail(f"state.{name}", tensor.dtype, required, _REMEDY)
        if tensor.ndim != 3:
            fail(f"state.{name}", f"of shape {list(tensor.shape)}", "of three dimensions", _REMEDY)
    batch, _, channels = values.shape
    partial = state.values.shape[1]
    wanted = {"values": [batch, partial, channels], "gates": [batch, partial, channels]}
    if state.previous_values is not None:
        wanted["previous_values"] = [batch, compress_ratio, channels // 2]
        wanted["previous_gates"] = wanted["previous_values"]
    for name, shape in wanted.items():
        found = list(getattr(state, name).shape)
        if found != shape or partial >= compress_ratio:
            required = f"{shape}, fewer than {compress_ratio} tokens in the partial block"
            fail(f"state.{name}", f"of shape {found}", required, _REMEDY)
    if state.previous_values is not None and not overlapping:
        fail("state.previous_values", "given", "None in the plain form", _REMEDY)
