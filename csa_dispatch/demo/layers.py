"""The V4 attention layer in small: compressor, indexer, and the call of ``attention()``.

Sizes are small and three things are simpler than in V4: one output projection instead of a grouped
low-rank one, no YaRN, and the indexer's keys and the entries share no weights with anything. The
rest follows the published layer: query compression and normalisation, one KV head that is key and
value, rotary channels last and rotated back after attention, gated pooling, sinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csa_dispatch import Call, Kind, attention

THETA_WINDOW = 10000.0
THETA_COMPRESSED = 160000.0


class LayerSizes(NamedTuple):
    """Sizes of an attention layer; ``ratio`` is 0 for a window layer."""

    d_model: int
    heads: int
    head_dim: int
    rope_dim: int
    query_rank: int
    window: int
    ratio: int = 0
    top_k: int = 0
    index_heads: int = 0
    index_dim: int = 0


Observer = Callable[[Call, Tensor, Tensor], None]
"""Gets a layer's call, its output ``[B, H, T, D]`` (in the graph) and its lse ``[B, H, T]``."""


def rotate(x: Tensor, positions: Tensor, theta: float, rope_dim: int, sign: int = 1) -> Tensor:
    """Rotary embedding of the last ``rope_dim`` channels of ``x`` ``[..., N, D]``.

    Channels 2i and 2i + 1 of them form a pair, turned by ``positions * theta^(-2i / rope_dim)``;
    ``sign=-1`` turns back.
    """
    pair = torch.arange(0, rope_dim, 2, device=x.device, dtype=torch.float32)
    angle = sign * positions[:, None] * theta ** (-pair / rope_dim)
    turn = torch.polar(torch.ones_like(angle), angle)
    still, turned = x[..., :-rope_dim], x[..., -rope_dim:].unflatten(-1, (-1, 2))
    pairs = torch.view_as_real(torch.view_as_complex(turned) * turn)
    return torch.cat((still, pairs.flatten(-2)), dim=-1)


class Compressor(nn.Module):
    """Pools every ``ratio`` tokens into one entry: ``[B, T, d_model] -> [B, T // ratio, dim]``.

    A channel at a time, ``entry = sum softmax(gate + bias) * value`` over the block's tokens.
    The overlapping form has two branches of values and gates and pools branch a of the block
    before together with branch b of the block itself; block 0 has none before it. Incomplete
    trailing blocks give no entry. Entry i carries the position of its block's first token.
    """

    def __init__(
        self, d_model: int, dim: int, ratio: int, rope_dim: int, *, overlapping: bool
    ) -> None:
        super().__init__()
        channels = 2 * dim if overlapping else dim
        self.ratio, self.rope_dim, self.overlapping = ratio, rope_dim, overlapping
        self.values = nn.Linear(d_model, channels, bias=False)
        self.gates = nn.Linear(d_model, channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(ratio, channels))
        self.norm = nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.shape[1] // self.ratio
        x = x[:, : blocks * self.ratio]
        values = self.values(x).unflatten(1, (blocks, self.ratio))
        gates = self.gates(x).unflatten(1, (blocks, self.ratio)) + self.bias
        if self.overlapping:
            values, gates = _with_block_before(values, 0.0), _with_block_before(gates, -math.inf)
        entries = self.norm((gates.softmax(dim=2) * values).sum(dim=2))
        positions = torch.arange(blocks, device=x.device) * self.ratio
        return rotate(entries, positions, THETA_COMPRESSED, self.rope_dim)


def _with_block_before(blocks: Tensor, fill: float) -> Tensor:
    """``[B, n, r, 2D] -> [B, n, 2r, D]``: branch a of block i - 1, then branch b of block i."""
    a, b = blocks.chunk(2, dim=-1)
    before = torch.cat((torch.full_like(a[:, :1], fill), a[:, :-1]), dim=1)
    return torch.cat((before, b), dim=2)


class Indexer(nn.Module):
    """Scores every entry for every token: ``sum_h w_h relu(q_h . k_i) / sqrt(dim)``.

    Trained by ``index_loss`` alone. Its inputs are detached, so that it never steers the model,
    and the picks it leads to carry no gradient.
    """

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        dim, heads = sizes.index_dim, sizes.index_heads
        self.sizes, self.rope_dim = sizes, dim // 2
        self.queries = nn.Linear(sizes.query_rank, heads * dim, bias=False)
        self.weights = nn.Linear(sizes.d_model, heads, bias=False)
        self.keys = Compressor(sizes.d_model, dim, sizes.ratio, self.rope_dim, overlapping=True)

    def forward(self, x: Tensor, query_residual: Tensor) -> Tensor:
        """Scores ``[B, T, S]``; entries that are not complete at a token are -inf."""
        heads, dim = self.sizes.index_heads, self.sizes.index_dim
        x, query_residual = x.detach(), query_residual.detach()
        tokens = torch.arange(x.shape[1], device=x.device)
        query = self.queries(query_residual).unflatten(-1, (heads, dim)).transpose(1, 2)
        query = rotate(query, tokens, THETA_COMPRESSED, self.rope_dim)
        weights = self.weights(x).transpose(1, 2)[..., None] * (heads * dim) ** -0.5
        scores = (F.relu(query @ self.keys(x)[:, None].mT) * weights).sum(dim=1)
        return scores.masked_fill(~complete(tokens, scores.shape[-1], self.sizes.ratio), -math.inf)


def complete(tokens: Tensor, entries: int, ratio: int) -> Tensor:
    """Bool ``[T, S]``: entry i is complete at token t, ``i < (t + 1) // ratio``."""
    return torch.arange(entries, device=tokens.device) < ((tokens + 1) // ratio)[:, None]


def pick(scores: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` best entries of each token, int32 ``[B, T, K]``; -1 where there are fewer."""
    best = scores.detach().topk(min(top_k, scores.shape[-1]), dim=-1)
    return torch.where(best.values > -math.inf, best.indices, -1).to(torch.int32)


def entry_attention(call: Call, lse: Tensor) -> Tensor:
    """Log attention each entry would draw, all heads together: ``[B, T, S]``, no gradient.

    ``log sum_h exp(scale * <query_h, entry> - lse_h)`` over every entry, picked or not.
    """
    assert call.sparse_kv is not None
    with torch.no_grad():
        logits = call.scale * call.query @ call.sparse_kv.mT
        return (logits - lse[..., None]).logsumexp(dim=1)


def index_loss(scores: Tensor, call: Call, lse: Tensor, ratio: int) -> Tensor:
    """KL divergence from the attention's own distribution over entries to the indexer's.

    Both are normalised over the entries that are complete at the token; tokens without one do
    not count. This is the dense warm-up objective of DeepSeek-V3.2's indexer.
    """
    rows = slice(ratio - 1, None)
    scores = scores[:, rows]
    hidden = scores == -math.inf
    target = entry_attention(call, lse)[:, rows].masked_fill(hidden, -math.inf).log_softmax(-1)
    found = scores.log_softmax(-1).masked_fill(hidden, 0.0)
    terms = target.exp() * (target.masked_fill(hidden, 0.0) - found)
    return terms.sum(dim=-1).mean()


class AttentionLayer(nn.Module):
    """One of the three V4 layer kinds around one ``attention()`` call."""

    def __init__(self, kind: Kind, sizes: LayerSizes) -> None:
        super().__init__()
        self.kind, self.sizes = kind, sizes
        self.theta = THETA_WINDOW if kind is Kind.WINDOW else THETA_COMPRESSED
        d_model, head_dim = sizes.d_model, sizes.head_dim
        self.query_down = nn.Linear(d_model, sizes.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(sizes.query_rank)
        self.query_up = nn.Linear(sizes.query_rank, sizes.heads * head_dim, bias=False)
        self.kv = nn.Linear(d_model, head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(head_dim)
        self.sink = nn.Parameter(torch.zeros(sizes.heads))
        self.out = nn.Linear(sizes.heads * head_dim, d_model, bias=False)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if kind is not Kind.WINDOW:
            overlapping = kind is Kind.GATHER
            self.compressor = Compressor(
                d_model, head_dim, sizes.ratio, sizes.rope_dim, overlapping=overlapping
            )
        if kind is Kind.GATHER:
            self.indexer = Indexer(sizes)

    def forward(self, x: Tensor, observe: Observer | None = None) -> tuple[Tensor, Tensor | None]:
        """Attention of ``x`` ``[B, T, d_model]``, and the indexer's loss when it has one."""
        sizes = self.sizes
        tokens = torch.arange(x.shape[1], device=x.device)
        residual = self.query_norm(self.query_down(x))
        query = self.query_up(residual).unflatten(-1, (sizes.heads, sizes.head_dim))
        query = F.rms_norm(query, (sizes.head_dim,)).transpose(1, 2)
        query = rotate(query, tokens, self.theta, sizes.rope_dim)
        local_kv = rotate(self.kv_norm(self.kv(x)), tokens, self.theta, sizes.rope_dim)

        entries = kv_indices = scores = None
        if self.compressor is not None:
            entries = self.compressor(x)[:, None]
        if self.indexer is not None:
            scores = self.indexer(x, residual)
            kv_indices = pick(scores, sizes.top_k)
        call = Call(
            query=query,
            local_kv=local_kv[:, None],
            sparse_kv=entries,
            kv_indices=kv_indices,
            attention_sink=self.sink,
            cu_seqlens=None,
            cu_seqlens_k=None,
            doc_ids=None,
            sliding_window_size=sizes.window,
            compress_ratio=sizes.ratio if self.kind is Kind.DENSE else None,
            scale=sizes.head_dim**-0.5,
        )
        output, lse = attend(call)
        if observe is not None:
            observe(call, output, lse)
        loss = None if scores is None else index_loss(scores, call, lse, sizes.ratio)
        # Values carry their rotation; turning back by the query's position makes it relative.
        output = rotate(output, tokens, self.theta, sizes.rope_dim, sign=-1)
        return self.out(output.transpose(1, 2).flatten(2)), loss


def attend(call: Call, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """``attention()`` with a Call's tensors and scalars: output and lse."""
    tensors, scalars = arguments_of(call)
    return attention(*tensors, **scalars, return_lse=True, backend=backend)


def arguments_of(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, by position and by name, that make ``attention()`` see this call."""
    tensors = (
        call.query,
        call.local_kv,
        call.sparse_kv,
        call.kv_indices,
        call.attention_sink,
    )
    scalars = {
        "sliding_window_size": call.sliding_window_size,
        "compress_ratio": call.compress_ratio,
        "scale": call.scale,
    }
    return tensors, scalars
