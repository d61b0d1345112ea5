"""An indexer that begins with random weights learns, from dense attention, what to pick."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch import Kind, record_receipts
from csa_dispatch.nn import CompressedSparseAttention
from tests.nn.small_layers import small_layer

TOKENS, PICKS, RATIO = 96, 4, 4


def recall(layer: CompressedSparseAttention, x: Tensor) -> float:
    """Share of the entries dense attention weighs most that are picked, of tokens that choose."""
    with torch.no_grad():
        _, seen = layer(x, dense=True, return_record=True)
        _, picked = layer(x, return_record=True)
    call = seen.call
    logits = call.scale * call.query @ call.sparse_kv.mT
    mass = (logits - seen.lse[..., None]).exp().sum(1)
    complete = (torch.arange(TOKENS) + 1) // RATIO
    mass = mass.masked_fill(torch.arange(mass.shape[2]) >= complete[:, None], -1)
    choosing = complete > PICKS
    best = mass.topk(PICKS).indices[:, choosing]
    picks = picked.call.kv_indices[:, choosing]
    return (picks[..., None] == best[:, :, None]).any(-1).float().mean().item()


def draw(topics: Tensor, generator: torch.Generator) -> Tensor:
    """Hidden states ``[8, T, C]``: a topic for each entry's tokens, and noise."""
    which = torch.randint(0, len(topics), (8, TOKENS // RATIO), generator=generator)
    noise = torch.randn(8, TOKENS, topics.shape[1], generator=generator)
    return topics[which.repeat_interleave(RATIO, 1)] + 0.3 * noise


def test_recall_rises_and_nothing_but_the_indexer_moves():
    layer = small_layer("csa", index_topk=PICKS)
    layer.requires_grad_(False)
    layer.indexer.requires_grad_()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    topics = torch.randn(8, layer.config.hidden_size, generator=generator)
    held_out = draw(topics, generator)
    started = recall(layer, held_out)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=3e-2)
    for _ in range(40):
        with record_receipts() as receipts:
            output, record = layer(draw(topics, generator), dense=True, return_record=True)
        assert not output.requires_grad
        kinds = [receipt.spec.kind for receipt in receipts if hasattr(receipt.spec, "kind")]
        assert kinds == [Kind.DENSE]
        optimizer.zero_grad()
        record.indexer_loss().backward()
        optimizer.step()
    learned = recall(layer, held_out)
    assert started < 0.4
    assert learned > 0.6
    for name, value in layer.state_dict().items():
        moved = not torch.equal(value, before[name])
        assert moved == ("indexer" in name), name
