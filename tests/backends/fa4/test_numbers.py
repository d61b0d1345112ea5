"""The adapter end to end on a CPU: FA4's documented meaning stands in for its kernels.

Slots, packing, padding, lse, layouts and gradients are the adapter's own and are judged against
the float64 oracle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from csa_backend_fa4 import FA4Backend, backend
from csa_backend_fa4.backward import SMALLEST_CHUNK, TOKEN_BLOCK, token_chunk
from csa_backend_fa4.operands import build_operands
from torch import Tensor

from csa_dispatch import ANY, Backend, Kind
from csa_dispatch.testing import (
    Case,
    attend,
    attention_run,
    backend_run,
    build,
    cases_for,
    check_case,
    to_call,
)
from tests.backends.fa4.documented import Recorder

SMALL = {
    "tokens": (1, 12),
    "heads": (1, 3, 64, 128),
    "window": (0, 1, 5),
    "pool": (20, 3),
    "slots": (9, 130),
    "batch": (1, 2),
}


def covering(strength: int) -> list[Case]:
    return cases_for(
        backend.forward_capabilities,
        backend.backward_capabilities,
        device_type="cuda",
        capability=100,
        axes=SMALL,
        strength=strength,
    )


def passes(case: Case, chosen: FA4Backend = backend) -> None:
    result = check_case(case, backend_run(chosen))
    assert result.status == "pass", f"{case.name}: {result.message}"


@pytest.mark.parametrize("case", covering(1), ids=lambda case: case.name)
def test_each_claimed_value_is_right(case: Case, kernels: Recorder):
    passes(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(2), ids=lambda case: case.name)
def test_each_pair_of_claimed_values_is_right(case: Case, kernels: Recorder):
    passes(case)


def test_nan_in_selected_rows_reaches_output_lse_and_gradients_and_no_more(kernels: Recorder):
    passes(Case(head_dim=512, dtype="bfloat16", tokens=9, content="nan"))


@pytest.mark.parametrize("kind", Kind)
def test_probabilities_kept_from_a_second_forward_give_the_same_gradients(
    kind: Kind, kernels: Recorder
):
    case = Case(kind=kind, head_dim=512, dtype="bfloat16", tokens=9, slots=130, batch=2)
    passes(case, FA4Backend(recompute_p=False))
    assert [call["recompute_p"] for call in kernels.backwards] == [False]


def test_a_sink_far_above_the_scores_is_the_lse(kernels: Recorder):
    inputs = build(Case(head_dim=512, dtype="bfloat16", tokens=4, heads=3, content="random"))
    sink = torch.tensor([500.0, math.inf, 0.0])
    output, lse = backend.forward(to_call(inputs._replace(attention_sink=sink)))
    assert lse[0, 0].eq(500).all()
    assert lse[0, 1].eq(math.inf).all()
    assert output[:, :2].eq(0).all()
    assert output[:, 2].ne(0).any()


def test_backward_takes_another_forward_s_output_and_lse(kernels: Recorder):
    from csa_backend_eager import backend as eager

    case = Case(head_dim=512, dtype="bfloat16", tokens=12, documents="cu_seqlens")
    result = check_case(case, backend_run(eager, backend))
    assert result.status == "pass", result.message
    assert not kernels.forwards


class OnAnyDevice(FA4Backend):
    """The backend without the claims that keep it off this machine."""

    name = "fa4_on_any_device"
    forward_capabilities = dataclasses.replace(
        FA4Backend.forward_capabilities, device_type=ANY, capability=ANY
    )
    backward_capabilities = dataclasses.replace(
        FA4Backend.backward_capabilities, device_type=ANY, capability=ANY
    )


def test_autograd_reaches_it_and_asks_the_kernels_to_keep_nothing(
    kernels: Recorder, registered: Callable[[Backend], Backend]
):
    name = registered(OnAnyDevice()).name
    case = Case(head_dim=512, dtype="bfloat16", tokens=9, batch=2)
    result = check_case(case, attention_run(name, layout="BSHD"))
    assert result.status == "pass", result.message
    assert [call["query"].requires_grad for call in kernels.forwards] == [False]


def test_compiled_calls_run_it_as_eager_ones_do(
    kernels: Recorder, registered: Callable[[Backend], Backend]
):
    name = registered(OnAnyDevice()).name
    inputs = build(Case(head_dim=512, dtype="bfloat16", tokens=9, documents="cu_seqlens"))
    leaves = [inputs.query, inputs.local_kv, inputs.sparse_kv, inputs.attention_sink]

    def step() -> tuple[Tensor, ...]:
        output, lse = attend(inputs, backend=name)
        return output, lse, *torch.autograd.grad(output, leaves, inputs.grad_output)

    def compiled() -> tuple[Tensor, Tensor]:
        return attend(inputs, backend=name)

    output, lse = torch.compile(compiled, backend="aot_eager", fullgraph=True)()
    found = (output, lse, *torch.autograd.grad(output, leaves, inputs.grad_output))
    assert (len(kernels.forwards), len(kernels.backwards)) == (1, 1)
    for one, other in zip(found, step(), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_inputs_that_the_kernels_can_address_are_not_copied(kernels: Recorder):
    case = Case(kind=Kind.WINDOW, head_dim=512, dtype="bfloat16", tokens=6, documents="doc_ids")
    inputs = build(case)
    call = to_call(inputs)
    output, lse = backend.forward(call)
    backend.backward(call, output, lse, inputs.grad_output, (True,) * 4)
    (forward,), (backward,) = kernels.forwards, kernels.backwards
    assert forward["query"].data_ptr() == call.query.data_ptr()
    assert forward["table"].data_ptr() == call.local_kv.data_ptr()
    assert forward["out"].data_ptr() == output.data_ptr()
    assert backward["dout"].data_ptr() == inputs.grad_output.data_ptr()


def test_indices_beyond_32_bits_are_unused_not_wrapped():
    inputs = build(Case(head_dim=512, dtype="bfloat16", tokens=2, window=1, index_dtype="int64"))
    assert inputs.kv_indices is not None
    chosen = torch.full_like(inputs.kv_indices, 2**32 + 1)
    indices = build_operands(to_call(inputs._replace(kv_indices=chosen))).indices
    assert indices.tolist() == [[[0] + [-1] * 127, [1] + [-1] * 127]]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_small_scratch_chunks_each_batch_entry_and_changes_no_gradient(
    batch: int, kernels: Recorder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("csa_backend_fa4.backward.SMALLEST_CHUNK", 128)
    case = Case(head_dim=512, dtype="bfloat16", heads=1, tokens=200, batch=batch, content="random")
    inputs = build(case)
    call = to_call(inputs)
    output, lse = backend.forward(call)
    arguments = (call, output, lse, inputs.grad_output, (True,) * 4)
    whole = backend.backward(*arguments)
    pieces = FA4Backend(scratch_bytes=1).backward(*arguments)
    assert [item["token_chunk"] for item in kernels.backwards] == [None] + [128] * batch
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other)


def test_chunks_are_whole_blocks_that_fit_and_are_evenly_cut():
    assert token_chunk(4096, 1, 4096) is None
    chunk = token_chunk(10_000, 2**20, 3000 * 2**20)
    assert chunk == 2560
    assert chunk % TOKEN_BLOCK == 0
    assert chunk * 4 >= 10_000
    # However little there is, a chunk still fills the GPU.
    assert token_chunk(10_000, 2**20, 1) == SMALLEST_CHUNK


@pytest.mark.parametrize(
    "options",
    [
        {"scratch_bytes": 0},
        {"scratch_bytes": "x"},
        {"scratch_bytes": 1e9},
        {"scratch_bytes": True},
        {"recompute_p": "no"},
        {"recompute_p": None},
    ],
)
def test_bad_options_are_refused(options: dict):
    name, value = next(iter(options.items()))
    with pytest.raises((TypeError, ValueError), match=rf"{name} is {value!r}; .*\. .+\."):
        FA4Backend(**options)
