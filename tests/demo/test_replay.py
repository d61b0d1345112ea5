"""The replay covers every backend with the layers' real tensors, and can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from csa_dispatch import Kind, backends, register_backend, unregister_backend
from csa_dispatch.demo.capture import first_tokens, in_dtype
from csa_dispatch.demo.layers import attend
from csa_dispatch.demo.mass import attention_mass
from csa_dispatch.demo.model import bits_per_byte
from csa_dispatch.demo.picks import entry_attention
from csa_dispatch.demo.replay import cell_count, explain_layers, replay
from csa_dispatch.testing import PlainBackend, mutants


@pytest.fixture(scope="module")
def cells(layers):
    return replay(layers, ["cpu"])


def test_captured_tensors_and_gradients_are_those_of_the_loss(trained, layers):
    assert [layer.label for layer in layers] == ["window", "CSA", "HCA"]
    model, spans = trained.model, trained.held_out[:1]
    logits, _ = model(spans[:, :-1])
    loss = bits_per_byte(logits, spans[:, 1:]).mean() * math.log(2)
    sinks = [block.attention.sinks for block in model.blocks]
    expected = torch.autograd.grad(loss, sinks)
    for layer, wanted in zip(layers, expected, strict=True):
        sink = layer.call.attention_sink.clone().requires_grad_()
        output, lse = attend(layer.call._replace(attention_sink=sink))
        torch.testing.assert_close(lse, layer.lse)
        found = torch.autograd.grad(output, sink, layer.grad_output)[0]
        torch.testing.assert_close(found, wanted)


def test_every_known_backend_has_a_cell_for_every_layer_and_dtype(cells, layers):
    assert len(cells) == cell_count(layers, ["cpu"])
    for name in backends():
        found = {(cell.layer, cell.dtype) for cell in cells if cell.backend == name}
        assert found == {(n, dtype) for n in (1, 2, 3) for dtype in ("float32", "bfloat16")}


def test_what_ran_passes_and_what_did_not_says_why(cells):
    for cell in cells:
        if cell.status == "refused":
            assert cell.reasons, cell
            assert cell.seconds is None
        else:
            assert cell.status == "pass", cell
            names = {verdict.name for verdict in cell.verdicts}
            expected = {"output", "lse", "dquery", "dlocal_kv", "dsink"}
            assert names == expected | ({"dsparse_kv"} if cell.label != "window" else set())
            assert 0 < cell.share <= 1
    ran = {cell.backend for cell in cells if cell.status == "pass"}
    assert {"eager", "attention_gym"} <= ran


SHOWN = (
    "sink dropped",
    "sink gradient zero",
    "window one longer",
    "dKV halved",
    "scale ignored",
    "lse in base 2",
    "negative index wraps",
    "last slot dropped",
    "entries counted early",
)
"""Faults that the layers of a model show; others need packed, hostile or larger calls."""


@pytest.mark.parametrize("name", SHOWN)
def test_a_wrong_backend_fails(layers, name):
    register_backend(next(mutant for mutant in mutants() if mutant.name == name))
    try:
        found = replay(layers, ["cpu"], [torch.float32])
    finally:
        unregister_backend(name)
    mine = [cell for cell in found if cell.backend == name]
    assert any(cell.status == "fail" and cell.message for cell in mine)


class _Broken(PlainBackend):
    def __init__(self) -> None:
        super().__init__()
        self.name = "broken"

    def backward(self, *_):
        raise RuntimeError("no such kernel")


def test_a_backend_that_raises_fails_with_its_message(layers):
    register_backend(_Broken())
    try:
        found = replay(layers[:1], ["cpu"], [torch.float32])
    finally:
        unregister_backend("broken")
    mine = next(cell for cell in found if cell.backend == "broken")
    assert mine.status == "fail"
    assert mine.message == "RuntimeError: no such kernel"


def test_a_slice_gives_the_first_rows_of_the_whole(layers):
    for layer in layers:
        part = first_tokens(layer, 17)
        output, lse = attend(part.call)
        whole, _ = attend(layer.call)
        torch.testing.assert_close(output, whole[:1, :, :17])
        torch.testing.assert_close(lse, layer.lse[:1, :, :17])


def test_the_sink_stays_fp32_in_bf16(layers):
    call = in_dtype(layers[1].call, torch.bfloat16)
    assert call.query.dtype == call.local_kv.dtype == call.sparse_kv.dtype == torch.bfloat16
    assert call.attention_sink.dtype == torch.float32


def test_equal_layers_are_explained_together(layers):
    found = explain_layers([*layers, layers[0]._replace(number=4)], "cpu")
    assert [item.layers for item in found] == [(1, 4), (2,), (3,)]
    for item in found:
        assert item.decision.forward == item.decision.backward == "eager"


def test_shares_of_the_softmax_sum_to_one_and_fit_the_kind(layers):
    for layer in layers:
        mass = attention_mass(layer)
        assert mass.defect < 1e-5
        assert mass.window + mass.selected + mass.sink == pytest.approx(1, abs=1e-5)
        assert (mass.selected == 0) == (layer.call.kind is Kind.WINDOW)
        assert 0 < mass.sink == pytest.approx(sum(mass.sink_by_head) / 2)


def test_a_wrong_lse_shows_in_the_shares(layers):
    wrong = layers[1]._replace(lse=layers[1].lse + 0.1)
    assert attention_mass(wrong).defect == pytest.approx(1 - math.exp(-0.1), rel=1e-3)


def test_recall_is_one_for_the_best_picks_and_low_for_the_worst(layers):
    layer = layers[1]
    drawn = entry_attention(layer.call, layer.lse)
    tokens, entries = drawn.shape[1:]
    hidden = torch.arange(entries) >= ((torch.arange(tokens) + 1) // layer.ratio)[:, None]
    for sign, expect_one in ((1, True), (-1, False)):
        scores = (sign * drawn).masked_fill(hidden, -math.inf)
        best = scores.topk(2, dim=-1)
        picks = torch.where(best.values > -math.inf, best.indices, -1).to(torch.int32)
        mass = attention_mass(layer._replace(call=layer.call._replace(kv_indices=picks)))
        assert mass.recall is not None
        assert mass.chance is not None
        if expect_one:
            assert mass.recall == pytest.approx(1)
            assert mass.chance < 1
        else:
            assert mass.recall < mass.chance


def test_an_interpreted_backend_replays_a_slice_and_says_so(layers, tmp_path):
    """Triton reads TRITON_INTERPRET when it defines kernels, so this takes a process."""
    code = (
        "import sys, json, torch\n"
        "from csa_dispatch.demo.replay import replay\n"
        "layers = torch.load(sys.argv[1], weights_only=False)\n"
        "cells = replay(layers, ['cpu'], [torch.float32])\n"
        "print(json.dumps([c._asdict() for c in cells if c.backend == 'triton'], default=str))\n"
    )
    saved = tmp_path / "layers.pt"
    torch.save(layers[1:2], saved)
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (cell,) = json.loads(done.stdout.splitlines()[-1])
    assert (cell["status"], cell["sliced"], cell["tokens"]) == ("pass", True, 32)
