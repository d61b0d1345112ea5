"""The V4 layer against loops in float64: kinds, packing, layouts, shards, the indexer's loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from csa_dispatch import IndexerSpec, attention, record_receipts, use_backend
from csa_dispatch.functional import indexer_kl_loss, indexer_scores
from csa_dispatch.functional.past import complete_entries
from csa_dispatch.nn import CompressedSparseAttention, LayerCache, load_layer
from tests.nn.reference import reference_layer
from tests.nn.small_layers import KINDS, config_of

pytestmark = pytest.mark.parametrize("kind", KINDS)


def test_output_is_the_layers_definition(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(2, 37)
    expected = torch.stack([reference_layer(layer, row) for row in x])
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_finite_differences(make_layer, hidden, kind):
    layer, x = make_layer(kind, dtype=torch.float64), hidden(1, 19, torch.float64)
    names, leaves = zip(
        *((name, weight) for name, weight in layer.named_parameters() if "indexer" not in name),
        strict=True,
    )
    upstream = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    gradients = torch.autograd.grad((layer(x) * upstream).sum(), (x, *leaves))
    for name, leaf, gradient in zip(("x", *names), (x, *leaves), gradients, strict=True):
        direction = torch.randn_like(leaf)
        with torch.no_grad():
            values = []
            for step in (1e-5, -2e-5):
                leaf += step * direction
                values.append((layer(x) * upstream).sum().item())
            leaf += 1e-5 * direction
        slope = (values[0] - values[1]) / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(slope, rel=2e-5, abs=1e-6), (
            name
        )


def test_packed_documents_are_documents_alone(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(1, 40)
    cu_seqlens = torch.tensor([0, 3, 3, 21, 37], dtype=torch.int32)
    packed = layer(x, cu_seqlens=cu_seqlens)
    for start, end in ((0, 3), (3, 21), (21, 37)):
        alone = layer(x[:, start:end])
        torch.testing.assert_close(packed[:, start:end], alone, rtol=1e-4, atol=1e-5)


def test_sequence_first_is_the_same_layer(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(3, 21)
    turned = layer(x.transpose(0, 1).contiguous(), layout="SBHD")
    torch.testing.assert_close(turned.transpose(0, 1), layer(x), rtol=1e-5, atol=1e-6)


def test_shards_of_the_heads_add_up(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(2, 21)
    tensors = {f"layers.0.self_attn.{name}": value for name, value in layer.state_dict().items()}
    shards = []
    for rank in range(2):
        shard = make_layer(kind, tp_size=2)
        load_layer(shard, tensors, 0, tp_rank=rank)
        assert shard.sinks.shape == (2,)
        shards.append(shard(x))
    torch.testing.assert_close(shards[0] + shards[1], layer(x), rtol=1e-5, atol=1e-6)


def test_a_forced_backend_runs_it(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(1, 21)
    with use_backend("attention_gym"):
        found = layer(x)
    torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("every_entry", [False, True])
def test_the_indexers_teacher_is_attention_over_the_entries_it_compares(
    make_layer, hidden, kind, every_entry, dense
):
    layer, x = make_layer(kind), hidden(2, 41)
    _, record = layer(x, dense=dense, return_record=True)
    if record.indexer is None:
        return
    call, queries = record.call, record.indexer.queries
    all_entries = every_entry or dense
    picks = complete_entries(call.query, 10, 0, 4) if all_entries else call.kv_indices
    call = call._replace(kv_indices=picks, compress_ratio=None)
    _, lse = attention(**call._asdict(), return_lse=True)
    scores = indexer_scores(queries.query, record.indexer.keys, queries.weights, picks)
    expected = indexer_kl_loss(scores, call.query, call.sparse_kv, picks, lse)
    torch.testing.assert_close(record.indexer_loss(every_entry=every_entry), expected)


def test_dense_attention_sees_every_entry_and_picks_none(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(2, 37)
    with record_receipts() as receipts:
        output = layer(x, dense=True)
    assert not any(isinstance(receipt.spec, IndexerSpec) for receipt in receipts)
    config = dataclasses.replace(layer.config, dense=True)
    without = CompressedSparseAttention(config)
    without.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(output, without(x))
    with torch.no_grad():
        cache = LayerCache(layer.config, 2)
        steps = [layer(part, cache=cache, dense=True) for part in x.split([20, 1, 3, 13], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every_entry", [False, True])
def test_only_the_indexer_learns_from_its_loss(make_layer, hidden, kind, every_entry):
    layer, x = make_layer(kind), hidden(2, 37).requires_grad_()
    output, record = layer(x, return_record=True)
    torch.testing.assert_close(output, layer(x))
    assert record.output.shape == record.call.query.shape
    if kind != "csa":
        with pytest.raises(ValueError, match="the layer has no indexer"):
            record.indexer_loss()
        return
    _, warming = layer(x, dense=True, return_record=True)
    (record.indexer_loss(every_entry=every_entry) + warming.indexer_loss()).backward()
    assert x.grad is None
    for name, weight in layer.named_parameters():
        if "indexer" in name:
            assert weight.grad.abs().sum() > 0, name
        else:
            assert weight.grad is None, name


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("every_entry", [False, True])
def test_the_indexers_loss_of_packed_documents_is_theirs_alone(
    make_layer, hidden, kind, every_entry, dense
):
    if kind != "csa":
        return
    layer, x = make_layer(kind), hidden(1, 40)

    def losses_of(x: torch.Tensor, **documents: torch.Tensor) -> torch.Tensor:
        _, record = layer(x, dense=dense, return_record=True, **documents)
        return record.indexer_loss(every_entry=every_entry, reduction="none")

    losses = losses_of(x, cu_seqlens=torch.tensor([0, 3, 21, 40], dtype=torch.int32))
    for start, end in ((0, 3), (3, 21), (21, 40)):
        expected = losses_of(x[:, start:end])
        torch.testing.assert_close(losses[:, start:end], expected, rtol=1e-4, atol=1e-5)


def test_bf16_is_near_fp32(make_layer, hidden, kind):
    layer, x = make_layer(kind, index_topk=9), hidden(2, 37)
    exact = layer(x)
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(torch.bfloat16)
    found = layer(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_bad_arguments_are_named(make_layer, hidden, kind):
    layer = make_layer(kind)
    with pytest.raises(ValueError, match="layout is 'BHSD'"):
        layer(hidden(1, 8), layout="BHSD")
    for shape, layout, remedy in (
        ((8, 32), "BSHD", r"hidden_states.unsqueeze\(0\)"),
        ((8, 32), "SBHD", r"hidden_states.unsqueeze\(1\)"),
        ((1, 1, 8, 32), "BSHD", "Drop or merge dimensions"),
        ((32,), "BSHD", "Reshape it"),
    ):
        with pytest.raises(ValueError, match=f"hidden_states is of shape .*{remedy}"):
            layer(torch.ones(shape), layout=layout)
    for device, error in (("gpu", ValueError), (3, TypeError), ([], TypeError)):
        with pytest.raises(error, match=r"device is .*; it must be a torch.device, its name or"):
            CompressedSparseAttention(layer.config, device=device)
        with pytest.raises(error, match=r"device is .*; it must be a torch.device, its name or"):
            LayerCache(layer.config, 1, device=device)
    with pytest.raises(ValueError, match=r"hidden_size is 10+; it must be an int from 1 to 92233"):
        config_of(**{**KINDS[kind], "hidden_size": 10**30})
    with pytest.raises(TypeError, match="cache is an int; it must be"):
        layer(hidden(1, 8), cache=1)
    with pytest.raises(TypeError, match="hidden_states is a list"):
        layer([hidden(1, 8)])
    with pytest.raises(ValueError, match="hidden_states is of 31 channels"):
        layer(hidden(1, 8)[..., 1:])
    with pytest.raises(ValueError, match="hidden_states is of no tokens"):
        layer(hidden(1, 8)[:, :0])
    with pytest.raises(ValueError, match=r"hidden_states is of torch.float16; .* Cast it"):
        layer(hidden(1, 8).half())
    with pytest.raises(ValueError, match=r"hidden_states is on meta; it must be on cpu.*Make it"):
        layer(hidden(1, 8).to("meta"))
    with pytest.raises(TypeError, match="dense is 'no'"):
        layer(hidden(1, 8), dense="no")
    with pytest.raises(TypeError, match="return_record is 1"):
        layer(hidden(1, 8), return_record=1)
    with pytest.raises(TypeError, match="cache is a str"):
        layer(hidden(1, 8), cache="c")
    with pytest.raises(TypeError, match="cu_seqlens is list"):
        layer(hidden(1, 8), cu_seqlens=[0, 8])
    with pytest.raises(ValueError, match="tp_size is 0"):
        make_layer(kind, tp_size=0)
    for name in ("sliding_window", "index_topk", "o_groups", "head_dim"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be an int of 1 or more"):
            config_of(**{**KINDS[kind], name: 0})
    with pytest.raises(ValueError, match="tp_size is 3"):
        make_layer(kind, tp_size=3)
    with pytest.raises(ValueError, match="o_groups is 3"):
        config_of(**KINDS[kind], o_groups=3)
    with pytest.raises(ValueError, match="qk_rope_head_dim is 26"):
        config_of(**KINDS[kind], qk_rope_head_dim=26)
    with pytest.raises(ValueError, match="compress_ratio is -1"):
        config_of(compress_ratio=-1)


def test_it_compiles_into_one_graph(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(2, 21)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, layer):
        leaf = x.clone().requires_grad_()
        output = run(leaf)
        output.square().sum().backward()
        results.append((output, leaf.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_under_autocast_it_runs_in_bf16(make_layer, hidden, kind):
    layer, x = make_layer(kind, index_topk=9), hidden(2, 37)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, record = layer(x, return_record=True)
    assert found.dtype == record.call.query.dtype == torch.bfloat16
    exact = layer(x)
    assert (found - exact).norm() < 0.02 * exact.norm()
