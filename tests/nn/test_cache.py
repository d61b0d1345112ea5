"""Decoding, a token or a few at a time, is the full forward at every step."""

from __future__ import annotations

import pytest
import torch

from csa_dispatch.nn import LayerCache
from tests.nn.small_layers import KINDS, config_of

CHUNKS = {
    "one by one": [1] * 40,
    "prompt, then one by one": [17, *[1] * 23],
    "a few": [2, 3, 1, 7, 2, 5, 6, 1, 4, 3, 6],
    "long after short": [1, 2, 30, 1, 6],
    "all": [40],
}


@torch.no_grad()
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_the_full_forward(make_layer, hidden, kind, chunks):
    layer, x = make_layer(kind), hidden(2, 40)
    full, cache = layer(x), LayerCache(layer.config, 2)
    seen = 0
    for part in x.split(CHUNKS[chunks], dim=1):
        found = layer(part, cache=cache)
        expected = full[:, seen : seen + part.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        seen += part.shape[1]
        assert cache.past == seen
    entries = 40 // layer.config.compress_ratio if layer.config.has_compressor else 0
    assert cache.entries.rows.shape == (2, entries, layer.config.head_dim)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_past_its_first_size(make_layer, hidden, kind):
    layer, x = make_layer(kind), hidden(1, 700)
    cache = LayerCache(layer.config, 1)
    layer(x[:, :650], cache=cache)
    found = layer(x[:, 650:651], cache=cache)
    torch.testing.assert_close(found, layer(x)[:, 650:651], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_step_computes_no_row_but_its_own(make_layer, hidden):
    from csa_dispatch import record_receipts

    layer, x = make_layer("csa"), hidden(1, 30)
    cache = LayerCache(layer.config, 1)
    layer(x, cache=cache)
    with record_receipts() as receipts:
        layer(x[:, :1], cache=cache)
    (spec,) = [receipt.spec for receipt in receipts if hasattr(receipt.spec, "window")]
    assert spec.tokens == 1
    assert spec.slots == layer.config.sliding_window + layer.config.index_topk


def test_what_a_cache_cannot_do_is_named(make_layer, hidden):
    layer, x = make_layer("csa"), hidden(1, 8)
    cache = LayerCache(layer.config, 1)
    with pytest.raises(ValueError, match="gradients are enabled"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="cu_seqlens is given with a cache"):
            layer(x, cache=cache, cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))
        with pytest.raises(ValueError, match="return_record is True with a cache"):
            layer(x, cache=cache, return_record=True)
        for other, match in (
            (LayerCache(config_of(compress_ratio=4, sliding_window=5), 1), "another layer's"),
            (LayerCache(layer.config, 2), "cache is of batch 2; it must be of 1"),
            (LayerCache(layer.config, 1, dtype=torch.bfloat16), "dtype torch.bfloat16"),
        ):
            with pytest.raises(ValueError, match=match):
                layer(x, cache=other)
            assert other.past == 0
            assert other.state is None


def test_a_cache_that_cannot_be_made_is_named(make_layer):
    config = make_layer("csa").config
    for arguments, error, match in (
        (({}, 2), TypeError, "config is a dict"),
        ((config, True), TypeError, "batch is True"),
        ((config, 2.0), TypeError, "batch is 2.0"),
        ((config, 0), ValueError, "batch is 0; it must be 1 or more"),
    ):
        with pytest.raises(error, match=match):
            LayerCache(*arguments)
    for dtype in (torch.int32, "float32"):
        with pytest.raises(TypeError, match="it must be a floating torch"):
            LayerCache(config, 2, dtype=dtype)


def test_a_cache_of_inference_mode_stays_there(make_layer, hidden):
    layer, x = make_layer("csa"), hidden(1, 12)
    with torch.inference_mode():
        cache = LayerCache(layer.config, 1)
        layer(x[:, :7], cache=cache)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="cache was made in torch"),
    ):
        layer(x[:, 7:], cache=cache)
    with torch.inference_mode():
        layer(x[:, 7:], cache=cache)
    assert cache.past == 12
