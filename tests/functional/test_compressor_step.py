"""``compress_kv_step``: any split of a sequence into steps gives what the whole gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csa_dispatch.functional import CompressorState, compress_kv, compress_kv_step

FORMS = {"overlapping": (4, True), "plain": (8, False), "one token": (1, False)}
TOKENS, HEAD_DIM = 33, 6


def draw(
    form: tuple[int, bool], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    ratio, overlapping = form
    channels = HEAD_DIM * (2 if overlapping else 1)
    values, gates = torch.randn(2, 2, TOKENS, channels).to(dtype)
    return values, gates, torch.randn(ratio, channels)


def in_steps(
    values: Tensor, gates: Tensor, bias: Tensor, form: tuple[int, bool], steps: list[int]
) -> tuple[list[Tensor], CompressorState | None]:
    ratio, overlapping = form
    state, found = None, []
    for part, gate in zip(values.split(steps, 1), gates.split(steps, 1), strict=True):
        entries, state = compress_kv_step(part, gate, state, bias, ratio, overlapping=overlapping)
        found.append(entries)
    return found, state


@pytest.mark.parametrize("steps", [[1] * 33, [33], [4, 4, 25], [3, 1, 1, 9, 19], [8, 1, 24]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_steps_give_the_whole_bit_for_bit(form: str, dtype: torch.dtype, steps: list[int]) -> None:
    ratio, overlapping = FORMS[form]
    values, gates, bias = draw(FORMS[form], dtype)
    found, _ = in_steps(values, gates, bias, FORMS[form], steps)
    whole = compress_kv(values, gates, bias, ratio, overlapping=overlapping).entries
    assert torch.equal(torch.cat(found, 1), whole)
    ends = torch.tensor(steps).cumsum(0)
    assert [item.shape[1] for item in found] == (ends // ratio).diff(
        prepend=torch.zeros(1, dtype=torch.long)
    ).tolist()


def test_the_state_is_small_and_its_own() -> None:
    """A view would keep all of the prefill alive."""
    values, gates, bias = draw(FORMS["overlapping"])
    _, state = in_steps(values, gates, bias, FORMS["overlapping"], [33])
    assert state is not None
    assert state.values.shape == (2, 1, 2 * HEAD_DIM)
    assert state.previous_values is not None
    assert state.previous_values.shape == (2, 4, HEAD_DIM)
    for tensor in state:
        assert tensor is not None
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_state_can_be_gone_back_to() -> None:
    values, gates, bias = draw(FORMS["overlapping"])
    _, state = in_steps(values[:, :10], gates[:, :10], bias, (4, True), [10])
    wrong = torch.full_like(values[:, :6], float("nan"))
    compress_kv_step(wrong, wrong, state, bias, 4)
    entries, _ = compress_kv_step(values[:, 10:], gates[:, 10:], state, bias, 4)
    assert torch.equal(entries, compress_kv(values, gates, bias, 4).entries[:, 2:])


def test_gradients_flow_through_the_state() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in draw(FORMS["overlapping"])]
    found, _ = in_steps(inputs[0], inputs[1], inputs[2], (4, True), [5, 1, 1, 1, 25])
    whole = compress_kv(inputs[0], inputs[1], inputs[2], 4).entries
    grad = torch.randn_like(whole)
    for one, other in zip(
        torch.autograd.grad(torch.cat(found, 1), inputs, grad),
        torch.autograd.grad(whole, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("before", [0, 4, 6], ids=["nothing", "a block", "a partial block"])
@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_complete_nothing_and_leave_the_state(form: str, before: int) -> None:
    values, gates, bias = draw(FORMS[form])
    ratio, overlapping = FORMS[form]
    state = None
    if before:
        part = values[:, :before], gates[:, :before]
        _, state = compress_kv_step(*part, state, bias, ratio, overlapping=overlapping)
    none = values[:, :0], gates[:, :0]
    entries, after = compress_kv_step(*none, state, bias, ratio, overlapping=overlapping)
    size = bias.shape[1] // (2 if overlapping else 1)
    assert list(entries.shape) == [len(values), 0, size]
    if state is None:
        assert (after.values.shape[1], after.previous_values) == (0, None)
        return
    for found, kept in zip(after, state, strict=True):
        assert (found is None) == (kept is None)
        assert found is None or kept is None or torch.equal(found, kept)


def test_a_state_of_another_call_is_refused() -> None:
    values, gates, bias = draw(FORMS["overlapping"])
    _, state = in_steps(values, gates, bias, (4, True), [33])
    assert state is not None
    with pytest.raises(ValueError, match=r"state\.values is of shape"):
        compress_kv_step(values[:1], gates[:1], state, bias, 4)
    with pytest.raises(ValueError, match=r"state\.previous_values is given"):
        compress_kv_step(values, gates, state, bias, 4, overlapping=False)
    with pytest.raises(TypeError, match="state is a tuple"):
        compress_kv_step(values, gates, tuple(state), bias, 4)  # pyright: ignore
    with pytest.raises(ValueError, match=r"state\.values is torch\.float32"):
        compress_kv_step(values.double(), gates.double(), state, bias, 4)
    with pytest.raises(ValueError, match=r"state\.previous_gates is None"):
        compress_kv_step(values, gates, state._replace(previous_gates=None), bias, 4)
    for missing in (CompressorState(None, None), state._replace(values=None)):  # pyright: ignore
        with pytest.raises(
            TypeError, match=r"state\.values is None; .* Pass the last step's state"
        ):
            compress_kv_step(values, gates, missing, bias, 4)
    state = state._replace(values=values, gates=gates)
    with pytest.raises(ValueError, match="fewer than 4 tokens"):
        compress_kv_step(values, gates, state, bias, 4)
    with pytest.raises(ValueError, match="compress_ratio is 0"):
        compress_kv_step(values, gates, None, bias, 0)
