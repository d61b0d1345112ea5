"""The adapter end to end on a CPU: cuDNN's documented meaning stands in for its kernels.

Slots, batch entries in one table, lse with and without the sink, and gradients are the adapter's
own and are judged against the float64 oracle.
"""

from __future__ import annotations

import math

import pytest
import torch
from csa_backend_cudnn import backend
from csa_backend_cudnn.backward import lse_without_sink
from csa_backend_cudnn.operands import build_operands
from csa_backend_eager import backend as eager

from csa_dispatch import Backend, Kind
from csa_dispatch.testing import Case, backend_run, build, cases_for, check_case, to_call
from tests.backends.cudnn.documented import Recorder

SMALL = {
    "tokens": (7, 1),
    "heads": (64, 2, 16, 128),
    "window": (0, 1, 5),
    "pool": (20, 3),
    "slots": (9, 130),
    "batch": (1, 2),
}


def covering(forward: Backend, capability: int, strength: int = 1) -> list[Case]:
    return cases_for(
        forward.forward_capabilities,
        backend.backward_capabilities,
        device_type="cuda",
        capability=capability,
        axes=SMALL,
        strength=strength,
    )


def passes(case: Case, forward: Backend) -> None:
    result = check_case(case, backend_run(forward, backend))
    assert result.status == "pass", f"{case.name}: {result.message}"


@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
@pytest.mark.parametrize("case", covering(eager, 90), ids=lambda case: case.name)
def test_as_a_backward_on_hopper_each_claimed_value_is_right(case: Case, kernels: Recorder):
    passes(case, eager)


@pytest.mark.parametrize("kernels", ["sm_100"], indirect=True)
@pytest.mark.parametrize("case", covering(backend, 100), ids=lambda case: case.name)
def test_on_blackwell_each_claimed_value_is_right(case: Case, kernels: Recorder):
    passes(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["sm_100"], indirect=True)
@pytest.mark.parametrize("case", covering(backend, 100, 2), ids=lambda case: case.name)
def test_each_pair_of_claimed_values_is_right(case: Case, kernels: Recorder):
    passes(case, backend)


def test_nan_in_selected_rows_reaches_what_sees_it_and_no_more(kernels: Recorder):
    case = Case(head_dim=512, dtype="bfloat16", heads=64, tokens=9, content="nan")
    passes(case, eager if kernels.hopper else backend)


@pytest.mark.parametrize("kernels", ["sm_100"], indirect=True)
def test_a_deterministic_call_asks_for_the_deterministic_kernel(kernels: Recorder):
    case = Case(head_dim=512, dtype="bfloat16", heads=64, tokens=5, deterministic=True)
    passes(case, eager)
    assert [call["deterministic"] for call in kernels.backwards] == [True, True]


def test_sinks_far_from_the_scores_keep_lse_and_gradients_right(kernels: Recorder):
    base = Case(head_dim=512, dtype="bfloat16", heads=64, tokens=6, content="random")
    inputs = build(base)
    sink = torch.linspace(-300, 300, 64)
    sink[0], sink[-1] = -math.inf, math.inf
    call = to_call(inputs._replace(attention_sink=sink))
    forward = eager if kernels.hopper else backend
    output, lse = forward.forward(call)
    assert lse[0, 40:63].eq(sink[40:63, None]).all()
    assert lse[0, 63].eq(math.inf).all()
    needs = (True,) * 4
    found = backend.backward(call, output, lse, inputs.grad_output, needs)
    wanted = eager.backward(call, output, lse, inputs.grad_output, needs)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)


def test_taking_the_sink_out_of_lse_and_adding_it_back_gives_lse():
    scores = torch.linspace(-40, 40, 81)[None, None]
    sink = torch.tensor([3.0])
    lse = torch.logaddexp(scores, sink)
    without = lse_without_sink(lse, sink)
    assert without.isfinite().all()
    torch.testing.assert_close(torch.logaddexp(without, sink), lse, rtol=1e-6, atol=1e-6)
    near = scores > -8  # farther below, nothing of the scores is left in lse
    torch.testing.assert_close(without[near], scores[near], rtol=1e-3, atol=1e-2)
    assert lse_without_sink(lse, None) is lse


def test_tensors_that_lie_by_token_are_not_copied(kernels: Recorder):
    case = Case(Kind.WINDOW, "bfloat16", heads=64, tokens=6, head_dim=512, memory="transposed")
    inputs = build(case)
    call = to_call(inputs)
    output, lse = eager.forward(call)
    backend.backward(call, output, lse, inputs.grad_output, (True,) * 4)
    (seen,) = kernels.backwards
    assert seen["q"].data_ptr() == call.query.data_ptr()
    assert seen["out"].data_ptr() == output.data_ptr()
    assert seen["dout"].data_ptr() == inputs.grad_output.data_ptr()
    assert seen["kv"].data_ptr() == call.local_kv.data_ptr()


def test_slots_name_rows_of_the_one_table_of_all_batch_entries():
    case = Case(
        head_dim=512,
        dtype="bfloat16",
        tokens=2,
        window=2,
        pool=3,
        slots=2,
        batch=2,
        content="random",
    )
    inputs = build(case)
    chosen = torch.tensor([[[0, 2], [-1, 5]], [[1, 1], [-1, -1]]], dtype=torch.int32)
    operands = build_operands(to_call(inputs._replace(kv_indices=chosen)))
    assert operands.table.shape == (10, 512)
    assert operands.indices[:, :4].tolist() == [
        [-1, 0, 2, 4],
        [0, 1, -1, -1],
        [-1, 5, 8, 8],
        [5, 6, -1, -1],
    ]
    assert operands.indices[:, 4:].eq(-1).all()
    assert operands.lengths.tolist() == [4, 2, 4, 2]


def test_indices_beyond_32_bits_are_unused_not_wrapped():
    inputs = build(Case(head_dim=512, dtype="bfloat16", tokens=2, window=1, index_dtype="int64"))
    assert inputs.kv_indices is not None
    chosen = torch.full_like(inputs.kv_indices, 2**32 + 1)
    operands = build_operands(to_call(inputs._replace(kv_indices=chosen)))
    assert operands.indices[:, 0].tolist() == [0, 1]
    assert operands.lengths.tolist() == [1, 1]
