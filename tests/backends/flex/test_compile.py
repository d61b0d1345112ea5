"""In a compiled graph FlexAttention compiles, records gradients and maps as outside of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from csa_backend_flex import FlexBackend, attend, masks
from torch import Tensor

from csa_dispatch import (
    ANY,
    BackendRefused,
    Kind,
    attention,
    record_receipts,
    register_backend,
    unregister_backend,
)
from csa_dispatch.testing import Case, backend_run, check_case
from csa_dispatch.testing.guards import NanInNewMemory
from tests.backends.flex import meaning
from tests.core.probes import inputs

NAME = "flex_by_meaning"


class BothDirections(FlexBackend):
    """With the backward that it has on CUDA."""

    name = NAME
    backward_capabilities = dataclasses.replace(FlexBackend.backward_capabilities, device_type=ANY)


@pytest.fixture(autouse=True, scope="module")
def both_directions() -> Iterator[None]:
    torch._dynamo.reset()
    compiled = torch.compile(meaning.attend, fullgraph=True, dynamic=False, backend="aot_eager")
    register_backend(BothDirections())
    limit = torch._dynamo.config.patch(recompile_limit=attend.RECOMPILES)
    with pytest.MonkeyPatch.context() as patch, limit:
        patch.setattr(attend, "_flex", compiled)
        yield
    unregister_backend(NAME)


def call(query: Tensor, local_kv: Tensor, pool: Tensor, sink: Tensor, backend=NAME) -> Tensor:
    kind = {"sliding_window_size": 4, "compress_ratio": 3}
    return attention(query * 1, local_kv, pool, None, sink, **kind, backend=backend)


def leaves(tokens: int) -> list[Tensor]:
    made = inputs(tokens=tokens, pool=tokens // 3, grad=True)
    return [made.query, made.local_kv, made.sparse_kv, made.attention_sink]


def run(function, tokens: int) -> list[Tensor]:
    made = leaves(tokens)
    output = function(*made)
    return [output.detach(), *torch.autograd.grad((output**2).sum(), made)]


@pytest.mark.parametrize(
    ("compiler", "dynamic"), [("aot_eager", None), ("aot_eager", True), ("inductor", None)]
)
def test_a_graph_runs_both_directions(compiler: str, dynamic: bool | None):
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=compiler)
    for tokens in (33, 33, 47):  # a graph's first run is unlike those after it
        with record_receipts() as receipts:
            found = run(compiled, tokens)
        ran = [(receipt.direction, receipt.backend) for receipt in receipts]
        assert ran == [("forward", NAME), ("backward", NAME)]
        torch.testing.assert_close(found, run(call, tokens))


def test_a_graph_says_that_a_cpu_has_no_backward():
    compiled = torch.compile(partial(call, backend="flex"), fullgraph=True, backend="aot_eager")
    with pytest.raises(BackendRefused, match="no backward there: backward_backend='eager'"):
        compiled(*leaves(33))


def test_it_is_compiled_where_a_dispatch_mode_looks_on():
    wanted = run(call, 33)
    with NanInNewMemory():
        torch.testing.assert_close(run(call, 33), wanted)
        case = Case(Kind.DENSE, tokens=33, pool=11, compress_ratio=3)
        result = check_case(case, backend_run(BothDirections()))
    assert result.status == "pass", result.message


def test_a_graph_keeps_no_mask_and_uses_none_that_was_kept(monkeypatch: pytest.MonkeyPatch):
    """CUDA graphs read again what they read, and hold memory that nobody else may keep."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    run(compiled, 33)
    run(compiled, 33)
    assert not masks._masks
    run(call, 33)
    assert len(masks._masks) == 1
    monkeypatch.setattr(masks, "_masks", None)
    run(compiled, 33)


@pytest.mark.parametrize("compiled", [False, True])
def test_inference_mode_leaves_nothing_that_training_cannot_use(compiled: bool):
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.inference_mode():
        output = function(*leaves(33))
    torch.testing.assert_close(run(call, 33)[0], output)
