"""``compress_kv`` against its float64 oracle, and the promises around it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise, product

import csa_backend_eager.compressor as eager
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import csa_dispatch
from csa_dispatch import CompressorCall, attention, compressor_call
from csa_dispatch.functional import compress_kv
from csa_dispatch.testing.compressor import compressor_shares

FORMS = {
    "overlapping": (4, True),
    "plain": (8, False),
    "overlapping by 3": (3, True),
    "one token": (1, False),
}
DTYPES = {
    "float64": (torch.float64, torch.float64),
    "float64, float32 bias": (torch.float64, torch.float32),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 bias": (torch.bfloat16, torch.float32),
    "float16, float32 bias": (torch.float16, torch.float32),
}
DOCUMENTS = {"one": None, "packed": [0, 5, 5, 6, 21, 29], "too short": [0, 2, 4]}
TOKENS, HEAD_DIM = 34, 6


def draw(
    form: tuple[int, bool],
    dtypes: tuple[torch.dtype, torch.dtype] = DTYPES["float32"],
    offsets: list[int] | None = None,
    spread: float = 2.0,
) -> CompressorCall:
    """A call whose values and gates need gradients and are NaN wherever no entry reads."""
    torch.manual_seed(0)
    ratio, overlapping = form
    batch, channels = (2 if offsets is None else 1), HEAD_DIM * (2 if overlapping else 1)
    values, gates = (spread * torch.randn(2, batch, TOKENS, channels)).to(dtypes[0])
    bias = torch.randn(ratio, channels).to(dtypes[1]).requires_grad_()
    cu_seqlens = pool = None
    if offsets is not None:
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        pool = compressor_call.pool_offsets(cu_seqlens, ratio)
    for tensor in (values, gates):
        for start, end in pairwise(offsets or [0, TOKENS]):
            used = (end - start) // ratio * ratio
            tensor[:, start + used : end] = math.nan
            if overlapping:  # branch a of the last block
                tensor[:, max(start, start + used - ratio) : start + used, :HEAD_DIM] = math.nan
        tensor[:, (offsets or [TOKENS])[-1] :] = math.nan
        tensor.requires_grad_()
    return CompressorCall(values, gates, bias, ratio, overlapping, cu_seqlens, pool)


def upstream(call: CompressorCall) -> Tensor:
    """An upstream gradient, always the same, that is NaN in spare rows."""
    torch.manual_seed(1)
    grad = torch.randn(call.values.shape[0], call.entries, call.head_dim).to(call.values.dtype)
    if call.cu_seqlens_k is not None:
        grad[:, int(call.cu_seqlens_k[-1]) :] = math.nan
    return grad


def compressed(call: CompressorCall, backend: str | None = None) -> Tensor:
    return compress_kv(
        *call[:4], overlapping=call.overlapping, cu_seqlens=call.cu_seqlens, backend=backend
    ).entries


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_entries_and_gradients_are_within_their_budgets(
    form: str, dtypes: str, documents: str
) -> None:
    call = draw(FORMS[form], DTYPES[dtypes], DOCUMENTS[documents])
    grad, entries = upstream(call), compressed(call)
    gradients = torch.autograd.grad(entries, call[:3], grad)
    shares = compressor_shares(call, (entries, *gradients), grad)
    assert max(shares.values()) < 1, shares


def test_large_gates_do_not_overflow() -> None:
    call = draw(FORMS["overlapping"], spread=1e4)
    grad, entries = upstream(call), compressed(call)
    gradients = torch.autograd.grad(entries, call[:3], grad)
    assert max(compressor_shares(call, (entries, *gradients), grad).values()) < 1


@pytest.mark.parametrize("fault", ["weights", "sum"])
def test_the_budget_catches_a_rounding_on_the_way(fault: str) -> None:
    ratio, call = 8, draw((8, False), DTYPES["bfloat16, float32 bias"])
    blocks = slice(0, call.entries * ratio)
    values = call.values.detach()[:, blocks].unflatten(1, (-1, ratio)).float()
    gates = call.gates.detach()[:, blocks].unflatten(1, (-1, ratio)).float()
    weights = (gates + call.position_bias.detach()).softmax(2)
    if fault == "weights":
        weights = weights.bfloat16().float()
    terms = weights * values
    wrong = (terms.bfloat16() if fault == "sum" else terms).float().sum(2).bfloat16()
    results = (wrong, *torch.autograd.grad(compressed(call), call[:3], upstream(call)))
    assert compressor_shares(call, results, upstream(call))["entries"] > 1


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_are_compressed_as_if_alone(form: str) -> None:
    call = draw(FORMS[form], offsets=DOCUMENTS["packed"])
    assert call.cu_seqlens is not None
    entries, cu_seqlens_k = compress_kv(
        *call[:4], overlapping=call.overlapping, cu_seqlens=call.cu_seqlens
    )
    assert cu_seqlens_k is not None
    assert cu_seqlens_k.dtype == torch.int32
    offsets, rows = call.cu_seqlens.tolist(), cu_seqlens_k.tolist()
    for n, (start, end) in enumerate(pairwise(offsets)):
        found = entries[:, rows[n] : rows[n + 1]]
        if end == start:
            assert not found.numel()
            continue
        alone = compress_kv(
            call.values[:, start:end],
            call.gates[:, start:end],
            *call[2:4],
            overlapping=call.overlapping,
        )
        assert alone.cu_seqlens_k is None
        assert torch.equal(found, alone.entries)
    assert entries.shape[1] == TOKENS // call.compress_ratio
    assert not entries[:, rows[-1] :].any()


@pytest.mark.parametrize("needs", list(product([False, True], repeat=3))[1:])
def test_gradients_alone_are_those_together(needs: tuple[bool, ...]) -> None:
    call = draw(FORMS["overlapping"])
    together = torch.autograd.grad(compressed(call), call[:3], upstream(call))
    inputs = [
        tensor.detach().requires_grad_(need) for tensor, need in zip(call[:3], needs, strict=True)
    ]
    compressed(call._replace(values=inputs[0], gates=inputs[1], position_bias=inputs[2])).backward(
        upstream(call)
    )
    for tensor, need, gradient in zip(inputs, needs, together, strict=True):
        if need:
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, gradient)
        else:
            assert tensor.grad is None


def test_any_memory_layout_is_right() -> None:
    call = draw(FORMS["overlapping"])
    fused = torch.cat(call[:2], 2).transpose(0, 1).contiguous().transpose(0, 1)
    values, gates = fused.detach().requires_grad_().chunk(2, -1)
    other = call._replace(values=values, gates=gates)
    assert torch.equal(compressed(other), compressed(call))
    expanded = torch.ones(1, 1, 1).expand(2, call.entries, HEAD_DIM)
    for one, two in zip(
        torch.autograd.grad(compressed(other), other[:3], expanded),
        torch.autograd.grad(compressed(call), call[:3], expanded),
        strict=True,
    ):
        assert torch.equal(one, two)


def test_fewer_tokens_than_a_block_give_no_entry() -> None:
    values = torch.randn(2, 3, 8, requires_grad=True)
    bias = torch.zeros(4, 8)
    entries = compress_kv(values, values, bias, 4).entries
    assert entries.shape == (2, 0, 4)
    entries.sum().backward()
    assert values.grad is not None
    assert not values.grad.any()


@pytest.mark.parametrize(("ratio", "head_dim"), [(4, 8), (2, 16), (128, 16)])
def test_ratio_4_overlaps_by_default(ratio: int, head_dim: int) -> None:
    values = torch.randn(1, 256, 16)
    entries = compress_kv(values, values, torch.zeros(ratio, 16), ratio).entries
    assert entries.shape == (1, 256 // ratio, head_dim)


def test_work_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw(FORMS["overlapping"])
    whole = torch.autograd.grad(compressed(call), call[:2], upstream(call))
    monkeypatch.setattr(eager, "WORK", 1)
    in_parts = torch.autograd.grad(compressed(call), call[:2], upstream(call))
    for one, other in zip(whole, in_parts, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_read_on_the_host() -> None:
    """Fake tensors have no data: reading any would raise."""
    call = draw(FORMS["overlapping"], offsets=DOCUMENTS["packed"])
    data = [item.detach() if isinstance(item, Tensor) else item for item in call]
    with FakeTensorMode() as mode:
        fake = CompressorCall(
            *(mode.from_tensor(item) if isinstance(item, Tensor) else item for item in data)  # pyright: ignore
        )
        assert fake.cu_seqlens is not None
        compressor_call.pool_offsets(fake.cu_seqlens, 4)
        compressor = eager.EagerCompressor()
        compressor.backward(fake, compressor.forward(fake), (True, True, True))


def test_offsets_outside_the_tokens_read_nothing_there() -> None:
    call = draw(FORMS["overlapping"])
    offsets = torch.tensor([0, 8, 4000], dtype=torch.int32)
    entries = compress_kv(call.values[:1], call.gates[:1], *call[2:4], cu_seqlens=offsets).entries
    assert entries.shape == (1, TOKENS // 4, HEAD_DIM)


def test_entries_and_offsets_are_what_attention_takes() -> None:
    call = draw(FORMS["overlapping"], offsets=DOCUMENTS["packed"])
    entries, cu_seqlens_k = compress_kv(*call[:4], cu_seqlens=call.cu_seqlens)
    query = torch.randn(1, 2, TOKENS, HEAD_DIM)
    output = attention(
        query,
        torch.randn(1, 1, TOKENS, HEAD_DIM),
        entries[:, None],
        sliding_window_size=4,
        compress_ratio=4,
        cu_seqlens=call.cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
    )
    output[:, :, :29].sum().backward()
    assert call.position_bias.grad is not None
    assert call.position_bias.grad.abs().sum() > 0


def test_it_is_dispatched_forced_and_explained() -> None:
    call = draw(FORMS["overlapping"])
    decision = csa_dispatch.explain(compress_kv, *call[:4], device="sm_90")
    assert (decision.forward, decision.backward) == ("triton", "triton")
    assert csa_dispatch.explain(compress_kv, *call[:4]).forward == "eager"
    with csa_dispatch.record_receipts() as receipts:
        compressed(call).sum().backward()
    assert [(item.direction, item.backend) for item in receipts] == [
        ("forward", "eager"),
        ("backward", "eager"),
    ]
    with pytest.raises(csa_dispatch.BackendRefused, match="compress_kv"):
        compressed(call, backend="attention_gym")


def test_it_compiles_without_a_graph_break() -> None:
    call = draw(FORMS["overlapping"], offsets=DOCUMENTS["packed"])

    def loss(values: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
        found = compress_kv(values, gates, bias, 4, cu_seqlens=call.cu_seqlens)
        return found.entries.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(*call[:3]), call[:3]),
        torch.autograd.grad(loss(*call[:3]), call[:3]),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_that_would_be_wrong_are_refused(transform: str) -> None:
    values, bias = torch.randn(1, 8, 6), torch.zeros(4, 6)

    def loss(values: Tensor) -> Tensor:
        return compress_kv(values, values, bias, 4).entries.sum()

    run: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(loss)(values),
        "jvp": lambda: torch.func.jvp(loss, (values,), (values,)),
    }
    with pytest.raises(NotImplementedError, match=r"compress_kv\(\) is inside torch\.func"):
        run[transform]()


def test_mapped_gradients_and_values_are_each_right() -> None:
    call = draw(FORMS["overlapping"], offsets=DOCUMENTS["packed"])
    entries = compressed(call)
    upstream = torch.stack([entries.detach(), entries.detach().square()])

    def gradients(one: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(entries, call[:3], one, retain_graph=True, **options)

    right = [torch.stack(each) for each in zip(*map(gradients, upstream), strict=True)]
    for found in (gradients(upstream, is_grads_batched=True), torch.vmap(gradients)(upstream)):
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other)

    stacked = torch.stack([call.values.detach(), call.gates.detach()]).requires_grad_()

    def mapped(values: Tensor) -> Tensor:
        return compressed(call._replace(values=values))

    leaves = [stacked, call.gates]
    found = torch.autograd.grad(torch.vmap(mapped)(stacked).sum(), leaves)
    total = torch.stack([mapped(values) for values in stacked]).sum()
    for one, other in zip(found, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("first", "second"), list(product(range(3), repeat=2)))
def test_differentiating_twice_raises(first: int, second: int) -> None:
    call = draw(FORMS["plain"])
    (gradient,) = torch.autograd.grad(compressed(call).sum(), call[first], create_graph=True)
    with pytest.raises(RuntimeError, match=r"compress_kv\(\) is differentiable once"):
        torch.autograd.grad(gradient.sum(), call[second])


def test_differentiating_by_the_upstream_gradient_raises() -> None:
    call = draw(FORMS["plain"])
    upstream = torch.ones_like(compressed(call)).requires_grad_()
    (gradient,) = torch.autograd.grad(compressed(call), call.gates, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match=r"compress_kv\(\) is differentiable once"):
        torch.autograd.grad(gradient.sum(), upstream)


GOOD = {
    "values": torch.zeros(1, 8, 6),
    "gates": torch.zeros(1, 8, 6),
    "position_bias": torch.zeros(4, 6),
    "compress_ratio": 4,
}
OFFSETS = torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"compress_ratio": 4.0}, TypeError, "compress_ratio is 4.0"),
        ({"compress_ratio": True}, TypeError, "compress_ratio is True"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio is 0"),
        ({"values": [1]}, TypeError, "values is list"),
        ({"gates": torch.zeros(1, 8, 6).to_sparse()}, ValueError, "gates is of layout"),
        ({"overlapping": "no"}, TypeError, "overlapping is 'no'"),
        ({"values": torch.zeros(1, 8, 6, dtype=torch.int64)}, TypeError, "values is torch.int64"),
        ({"values": torch.zeros(8, 6)}, ValueError, r"values is of shape \[8, 6\]"),
        ({"values": torch.zeros(1, 8, 5)}, ValueError, "overlapping=False"),
        ({"gates": torch.zeros(1, 9, 6)}, ValueError, "gates is of shape"),
        ({"gates": torch.zeros(1, 8, 6).double()}, ValueError, "gates is torch.float64"),
        ({"gates": torch.zeros(1, 8, 6, device="meta")}, ValueError, "gates is on meta"),
        ({"position_bias": torch.zeros(3, 6)}, ValueError, r"\[4, 6\]"),
        ({"position_bias": torch.zeros(4, 6).half()}, ValueError, "float16"),
        ({"cu_seqlens": OFFSETS.long()}, TypeError, "cu_seqlens is torch.int64"),
        ({"cu_seqlens": OFFSETS[:1]}, ValueError, r"\[N \+ 1\]"),
        (
            {
                "values": torch.zeros(2, 8, 6),
                "gates": torch.zeros(2, 8, 6),
                "cu_seqlens": OFFSETS,
            },
            ValueError,
            "batch size 2",
        ),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as raised:
        compress_kv(**{**GOOD, **change})  # pyright: ignore[reportArgumentType]
    assert re.search(r"; it must be .*\. .+\.$", str(raised.value)), "no remedy"
