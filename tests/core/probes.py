"""Small real backends and inputs for the dispatcher's own tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch import Backend, Call, Capabilities, Gradients, enable_autograd


def dense_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Window attention with a sink by full masked softmax; differentiable."""
    query, key = (
        call.query,
        call.local_kv.repeat_interleave(call.query.shape[1] // call.local_kv.shape[1], dim=1),
    )
    position = torch.arange(query.shape[2])
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < call.sliding_window_size)
    logits = (query @ key.mT * call.scale).masked_fill(~seen, float("-inf"))
    sink = call.attention_sink
    if sink is None:
        sink = torch.full((query.shape[1],), float("-inf"))
    column = sink.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
    joined = torch.cat((logits, column), dim=-1)
    lse = joined.logsumexp(-1)
    return torch.softmax(joined, -1)[..., :-1] @ key, lse.detach()


class WindowBackend(Backend):
    """A third party's plain window backend, named at construction."""

    summary = "window only, dense"

    def __init__(
        self,
        name: str,
        capabilities: Capabilities | None = None,
        backward: Capabilities | bool | None = True,
    ) -> None:
        self.name = name
        self.forward_capabilities = capabilities or Capabilities()
        if isinstance(backward, bool):
            backward = self.forward_capabilities if backward else None
        self.backward_capabilities = backward

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = dense_forward(call)
        return output, lse.contiguous()

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        inputs = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
        leaves = [None if item is None else item.detach().requires_grad_() for item in inputs]
        query, local_kv, sparse_kv, sink = leaves
        assert query is not None
        assert local_kv is not None
        replaced = call._replace(
            query=query, local_kv=local_kv, sparse_kv=sparse_kv, attention_sink=sink
        )
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        with enable_autograd():
            found = iter(torch.autograd.grad(dense_forward(replaced)[0], wanted, grad_output))
        return Gradients(*(next(found) if need else None for need in needs))


class Inputs(NamedTuple):
    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor
    kv_indices: Tensor
    attention_sink: Tensor


def inputs(
    *,
    heads: int = 4,
    groups: int = 1,
    tokens: int = 8,
    pool: int = 6,
    slots: int = 3,
    head_dim: int = 16,
    batch: int = 1,
    grad: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Deterministic inputs in BHSD order, every fourth slot unused."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)

    indices = torch.randint(0, max(pool, 1), (batch, tokens, slots), generator=generator)
    indices[..., ::4] = -1
    return Inputs(
        draw(batch, heads, tokens, head_dim),
        draw(batch, groups, tokens, head_dim),
        draw(batch, groups, pool, head_dim),
        indices.to(torch.int32),
        draw(heads).to(torch.float32).detach().requires_grad_(grad),
    )
