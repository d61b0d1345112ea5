"""torch.compile, export and checkpointing: attention() is one opaque operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from csa_dispatch import (
    attention,
    backends,
    explain,
    record_receipts,
    use_backend,
    use_policy,
)
from csa_dispatch.policy import parse_policy
from tests.core.probes import inputs

BACKENDS = ["eager", "attention_gym", "flex"]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def call_of(backend: str) -> Callable[..., Any]:
    """``attention()`` of ``inputs()`` by a backend, in a kind it has."""

    def dense(query: Tensor, local_kv: Tensor, pool: Tensor, _: Tensor, sink: Tensor) -> Any:
        return attention(
            query,
            local_kv,
            pool,
            None,
            sink,
            sliding_window_size=4,
            compress_ratio=3,
            return_lse=True,
            backend=backend,
            backward_backend="eager",
        )

    gather = partial(attention, sliding_window_size=4, return_lse=True, backend=backend)
    return dense if backend == "flex" else gather


def grads(tensors: Any) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors if tensor.is_floating_point()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_whole_graph_forward_and_backward_at_three_lengths(
    backend: str, dynamic: bool | None
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = call_of(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    for tokens in (33, 47, 64):
        traced = inputs(tokens=tokens, pool=tokens // 3, grad=True)
        plain = inputs(tokens=tokens, pool=tokens // 3, grad=True)
        (output, lse), (expected, expected_lse) = compiled(*traced), call(*plain)
        (output**2).sum().backward()
        (expected**2).sum().backward()
        torch.testing.assert_close((output, lse), (expected, expected_lse))
        for got, wanted in zip(grads(traced), grads(plain), strict=True):
            torch.testing.assert_close(got, wanted)
    assert counter.frame_count <= (1 if dynamic else 2)


@pytest.mark.parametrize("backend", ["eager", "flex"])
def test_inductor_gives_the_same_results(backend: str) -> None:
    traced, plain = inputs(grad=True), inputs(grad=True)
    compiled = torch.compile(call_of(backend), fullgraph=True)
    output, lse = compiled(*traced)
    expected, expected_lse = call_of(backend)(*plain)
    output.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close((output, lse), (expected, expected_lse))
    torch.testing.assert_close(grads(traced), grads(plain))


def test_twenty_packed_layouts_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(cu_seqlens: Tensor, cu_seqlens_k: Tensor, *made: Tensor) -> Tensor:
        return attention(
            *made, sliding_window_size=4, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k
        )

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for cut in range(1, 21):
        offsets = (
            torch.tensor([0, cut, 32], dtype=torch.int32),
            torch.tensor([0, cut // 2, 12], dtype=torch.int32),
        )
        made = inputs(tokens=32, pool=12, grad=True)
        output = compiled(*offsets, *made)
        output.sum().backward()
        torch.testing.assert_close(output, step(*offsets, *made))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["BSHD", "SBHD"])
def test_other_layouts_and_strided_queries_trace(layout: str) -> None:
    made = inputs(tokens=8)
    orders = {"BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3)}
    moved = [tensor.permute(orders[layout]) for tensor in made[:3]]
    call = partial(attention, layout=layout, sliding_window_size=3)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    output = compiled(*moved, *made[3:])
    expected = call(*moved, *made[3:])
    torch.testing.assert_close(output, expected)
    assert output.stride() == expected.stride()


def test_block_inside_traced_code_forces_and_ends() -> None:
    def step(query: Tensor, local_kv: Tensor) -> tuple[Tensor, Tensor]:
        with use_backend("attention_gym"):
            first = attention(query, local_kv, sliding_window_size=3)
        return first, attention(query, local_kv, sliding_window_size=2)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    made = inputs()
    with record_receipts() as receipts:
        compiled(made.query, made.local_kv)
    assert [receipt.backend for receipt in receipts] == ["attention_gym", "eager"]


def test_unforced_graph_follows_the_policy_in_force_when_it_runs() -> None:
    compiled = torch.compile(
        lambda *made: attention(*made, sliding_window_size=3), fullgraph=True, backend="aot_eager"
    )
    policy = parse_policy({"rule": [{"prefer": ["attention_gym"]}]}, "test")
    made = inputs()
    with record_receipts() as receipts:
        compiled(made.query, made.local_kv)
        with use_policy(policy):
            compiled(made.query, made.local_kv)
    assert [receipt.backend for receipt in receipts] == ["eager", "attention_gym"]


def test_first_call_of_a_process_may_be_traced() -> None:
    """Discovery and environment reads must not be for dynamo to follow."""
    import subprocess
    import sys

    source = (
        "import torch\nfrom csa_dispatch import attention\n"
        "x = torch.randn(1, 2, 8, 16)\n"
        "f = torch.compile(attention, fullgraph=True, backend='aot_eager')\n"
        "print(f(x, x[:, :1], sliding_window_size=3).shape)\n"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("case", ["gather", "window", "dense", "packed", "strided"])
def test_operators_pass_opcheck(case: str) -> None:
    made = inputs(grad=True)
    packed = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
    strided = [item.transpose(1, 2).clone().transpose(1, 2) for item in made[:3]]
    variants: dict[str, tuple[Any, ...]] = {
        "gather": (*made, None, None, None, 4, None),
        "window": (made[0], made[1], None, None, None, None, None, None, 4, None),
        "dense": (*made[:3], None, made[4], None, None, None, 4, 2),
        "packed": (*made, *packed, None, 4, None),
        "strided": (*strided, *made[3:], None, None, None, 4, None),
    }
    tensors = variants[case]
    differentiable = (tensors[0], tensors[1], tensors[2], tensors[4])
    needs = [tensor is not None for tensor in differentiable]
    arguments = (*tensors, 0.25, needs, "", "", False)
    torch.library.opcheck(torch.ops.csa_dispatch.attention.default, arguments)
    detached = [item.detach() if isinstance(item, Tensor) else item for item in arguments]
    output, lse = torch.ops.csa_dispatch.attention(*detached)
    torch.library.opcheck(
        torch.ops.csa_dispatch.attention_backward.default,
        (torch.ones_like(output), output, lse, *detached[:14]),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_export_keeps_one_operator() -> None:
    class Layer(torch.nn.Module):
        def forward(self, *made: Tensor) -> Tensor:
            return attention(*made, sliding_window_size=4)

    made = inputs()
    exported = torch.export.export(Layer(), tuple(made))
    torch.testing.assert_close(exported.module()(*made), Layer()(*made))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("csa_dispatch.attention.default") == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_equals_the_plain_run(reentrant: bool) -> None:
    saved, plain = inputs(grad=True), inputs(grad=True)
    call = partial(attention, sliding_window_size=4)
    checkpoint(call, *saved, use_reentrant=reentrant).sum().backward()
    call(*plain).sum().backward()
    torch.testing.assert_close(grads(saved), grads(plain))


def test_selective_checkpointing_can_name_the_operator() -> None:
    operator = torch.ops.csa_dispatch.attention.default

    def policy(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = op is operator
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    made = inputs(grad=True)
    with record_receipts() as receipts:
        checkpoint(
            lambda *tensors: attention(*tensors, sliding_window_size=4) * 2,
            *made,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        ).sum().backward()
    assert [receipt.direction for receipt in receipts] == ["forward", "backward"]


def test_a_block_around_a_graph_traced_outside_it_is_not_ignored() -> None:
    made = inputs()
    call = torch.compile(partial(attention, sliding_window_size=3), backend="aot_eager")
    right = call(*made)
    with use_backend("eager"):  # what it runs anyway
        assert torch.equal(call(*made), right)
    with use_backend("attention_gym"), pytest.raises(RuntimeError, match="traced without it"):
        call(*made)
    with use_backend("attention_gym"), use_backend(None):
        assert torch.equal(call(*made), right)
    torch.compiler.reset()
    with use_backend("attention_gym"), record_receipts() as receipts:
        call(*made)
    assert [receipt.backend for receipt in receipts] == ["attention_gym"]


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_query_and_kv_and_keeps_the_sink(compiled: bool) -> None:
    made = inputs(grad=True)
    call: Any = partial(attention, sliding_window_size=3, return_lse=True)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16), record_receipts() as receipts:
        output, lse = call(*made)
        output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert {(item.spec.dtype, item.spec.sink) for item in receipts} == {("bfloat16", "float32")}
    assert [grad.dtype for grad in grads(made) if grad is not None] == [torch.float32] * 4
    double = inputs(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*double, sliding_window_size=3).dtype == torch.float64


def test_every_available_cpu_backend_is_covered_here() -> None:
    claimed = {
        name
        for name, row in backends().items()
        if row.available
        and row.backend is not None
        and row.origin.startswith("csa_backend_")
        and "cpu" in row.backend.forward_capabilities.device_type
        and True in row.backend.forward_capabilities.tracing
    }
    interpreted_elsewhere = {"triton"}
    assert claimed - interpreted_elsewhere <= set(BACKENDS)


@pytest.mark.parametrize("dynamic", [None, True])
def test_explain_in_traced_code_is_a_constant_of_the_graph(dynamic: bool | None) -> None:
    def step(*made: Tensor) -> tuple[Tensor, str | None, str | None]:
        decision = explain(*made, sliding_window_size=4)
        with use_backend("attention_gym"):
            forced = explain(*made, sliding_window_size=4)
        output = attention(*made, sliding_window_size=4)
        if decision.forward == "eager":
            output = output * 2
        return output, decision.forward, forced.forward

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (8, 12):
        made = inputs(tokens=tokens, grad=True)
        output, chosen, forced = compiled(*made)
        assert (chosen, forced) == ("eager", "attention_gym")
        torch.testing.assert_close(output, step(*made)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 4, 5, 16)}, "local_kv is .*; it must be .*, G, "),
        ({"kv_indices": torch.zeros(1, 5, 3).int()}, r"kv_indices is .*; it must be .*, K\]"),
        ({"sliding_window_size": -4}, "sliding_window_size is .*; it must be 0"),
        ({"sliding_window_size": 4.0}, r"sliding_window_size is .*\(float\).*; it must be an int"),
    ],
)
def test_a_bad_argument_is_named_though_sizes_are_symbolic(
    change: dict[str, Any], message: str
) -> None:
    arguments = {**inputs()._asdict(), "sliding_window_size": 4, **change}
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Unsupported, match=f"(Value|Type)Error.*{message}"):
        compiled(**arguments)
