"""Calls of V4's shapes for the GPU checks of the portable kernels, and what they must give.

Shapes are A, B and C of docs/performance.md. The reference is float64 on the device, every row of
every gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from csa_backend_triton.portable_backward import backward
from csa_backend_triton.portable_forward import forward
from torch import Tensor

from csa_dispatch.call import Call, Kind, token_bounds
from csa_dispatch.call_spec import CallSpec

ALL = (True, True, True, True)


class Shape(NamedTuple):
    """One call's sizes; ``selection`` is causal, full or messy (see ``draw``)."""

    kind: str = "gather"
    tokens: int = 4096
    heads: int = 64
    head_dim: int = 512
    window: int = 128
    slots: int = 512
    pool: int = 1024
    ratio: int = 4
    dtype: str = "bfloat16"
    packed: bool = False
    selection: str = "causal"


SHAPES = {
    "A": Shape(),
    "B": Shape(tokens=8192, heads=128, slots=1024, pool=2048),
    "C": Shape(head_dim=128, slots=128),
    "H16": Shape(heads=16),
    "H8": Shape(heads=8),
    "window": Shape("window"),
    "dense": Shape("dense", tokens=65536, pool=512, ratio=128),
}


def draw(shape: Shape, device: str, seed: int = 0) -> tuple[Call, Tensor]:
    """A call and an upstream gradient.

    causal: distinct rows before (t + 1) // ratio, then -1. messy: besides, -1 and out-of-range
    slots anywhere, repeated slots, NaN in every row nobody selects.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    tokens, heads, head_dim, pool = shape.tokens, shape.heads, shape.head_dim, shape.pool
    query, local = normal(1, heads, tokens, head_dim), normal(1, 1, tokens, head_dim)
    sparse = None if shape.kind == "window" else normal(1, 1, pool, head_dim)
    upstream = normal(1, heads, tokens, head_dim)
    sink = torch.randn(heads, generator=generator, device=device)
    offsets = offsets_k = indices = None
    if shape.packed:
        cuts = [0, 1, tokens // 3 + 5, tokens // 3 + 5, tokens - 7]
        offsets = torch.tensor(cuts, dtype=torch.int32, device=device)
        if sparse is not None:
            offsets_k = (offsets * pool // tokens).to(torch.int32)
    if shape.kind == "gather":
        limit = (torch.arange(tokens, device=device) + 1) // shape.ratio
        if shape.selection == "full":
            limit = torch.full_like(limit, pool)
        order = torch.rand(tokens, pool, generator=generator, device=device)
        order.masked_fill_(torch.arange(pool, device=device) >= limit[:, None], 2.0)
        value, chosen = order.topk(min(shape.slots, pool), dim=1, largest=False)
        indices = torch.where(value < 1.5, chosen, -1)
        if shape.selection == "messy":
            dice = torch.rand(tokens, indices.shape[1], generator=generator, device=device)
            indices = torch.where(dice > 0.9, indices.roll(1, 1), indices)
            indices = torch.where(dice < 0.1, -1, indices)
            indices = torch.where((dice > 0.1) & (dice < 0.13), pool + 5, indices)
            # Packed documents end before the pool's last row.
            unread = pool - 1 if shape.packed else 3
            if not shape.packed:
                indices[indices == unread] = -1
            assert sparse is not None
            sparse[:, :, unread] = float("nan")
        indices = indices.to(torch.int32)[None].contiguous()
    ratio = shape.ratio if shape.kind == "dense" else None
    scale = head_dim**-0.5
    call = Call(
        query, local, sparse, indices, sink, offsets, offsets_k, None, shape.window, ratio, scale
    )
    return call, upstream


def described(shape: Shape) -> CallSpec:
    """The call's metadata alone."""
    return CallSpec(
        kind=Kind.DENSE if shape.kind == "dense" else Kind(shape.kind),
        dtype=shape.dtype,
        heads=shape.heads,
        tokens=shape.tokens,
        head_dim=shape.head_dim,
        pool=shape.pool,
        slots=shape.slots,
        window=shape.window,
        compress_ratio=shape.ratio if shape.kind == "dense" else 0,
        documents="cu_seqlens" if shape.packed else "none",
    )


def visible_keys(call: Call, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Rows of local + pool (the window's first) that tokens ``first .. end - 1`` see, and which
    are real."""
    tokens, window = call.query.shape[2], call.sliding_window_size
    device = call.query.device
    bounds = token_bounds(call)
    token = torch.arange(first, end, device=device)
    start = torch.zeros_like(token) if bounds is None else bounds.window_start[0, first:end]
    local = token[:, None] - torch.arange(window, device=device)
    real = local >= start[:, None]
    if call.sparse_kv is None:
        return torch.where(real, local, 0), real
    pool = call.sparse_kv.shape[2]
    low = torch.zeros_like(token) if bounds is None else bounds.pool_start[0, first:end]
    high = torch.full_like(token, pool) if bounds is None else bounds.pool_end[0, first:end]
    if call.kv_indices is None:
        chosen = torch.arange(pool, device=device).expand(end - first, -1)
        used = (chosen >= low[:, None]) & (chosen < high[:, None])
    else:
        slot = call.kv_indices[0, first:end].long()
        used = (slot >= 0) & (slot < (high - low)[:, None])
        chosen = slot + low[:, None]
    rows = torch.cat([local, chosen + tokens], 1)
    real = torch.cat([real, used], 1)
    return torch.where(real, rows, 0), real


def reference(call: Call, upstream: Tensor, chunk: int = 32) -> dict[str, Tensor]:
    """Output, lse and gradients in float64."""
    query = call.query[0].transpose(0, 1)
    tokens, heads, head_dim = query.shape
    parts = [call.local_kv[0, 0]]
    if call.sparse_kv is not None:
        parts.append(call.sparse_kv[0, 0])
    kv = torch.cat(parts).double()
    grad_kv = torch.zeros_like(kv)
    sink = call.attention_sink.double()
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64, device=kv.device)
    lse = torch.empty(tokens, heads, dtype=torch.float64, device=kv.device)
    grad_query, grad_sink = torch.empty_like(out), torch.zeros_like(sink)
    for first in range(0, tokens, chunk):
        end = min(first + chunk, tokens)
        rows, real = visible_keys(call, first, end)
        keys = kv[rows].masked_fill(~real[..., None], 0)
        q, do = query[first:end].double(), upstream[0, :, first:end].transpose(0, 1).double()
        score = torch.einsum("thd,tkd->thk", q, keys) * call.scale
        score = score.masked_fill(~real[:, None], float("-inf"))
        total = torch.logaddexp(score.logsumexp(2), sink)
        p = torch.exp(score - total[..., None])
        o = torch.einsum("thk,tkd->thd", p, keys)
        delta = (o * do).sum(2, keepdim=True)
        ds = p * (torch.einsum("thd,tkd->thk", do, keys) - delta) * call.scale
        out[first:end], lse[first:end] = o, total
        grad_query[first:end] = torch.einsum("thk,tkd->thd", ds, keys)
        grad = torch.einsum("thk,thd->tkd", p, do) + torch.einsum("thk,thd->tkd", ds, q)
        grad_kv.index_add_(0, rows.flatten(), (grad * real[..., None]).flatten(0, 1))
        grad_sink -= (torch.exp(sink - total) * delta[..., 0]).sum(0)
    found = {
        "out": out.transpose(0, 1),
        "lse": lse.transpose(0, 1),
        "dq": grad_query.transpose(0, 1),
        "dlocal": grad_kv[:tokens],
        "dsink": grad_sink,
    }
    if call.sparse_kv is not None:
        found["dpool"] = grad_kv[tokens:]
    return found


def check(name: str, shape: Shape, device: str, deterministic: bool = False) -> dict[str, Any]:
    """Relative Frobenius errors of one shape; NaN anywhere shows as nan."""
    call, upstream = draw(shape, device, seed=1)
    bounds = token_bounds(call)
    wanted = reference(call, upstream)
    out, lse = forward(call, bounds)
    found = backward(call, bounds, out, lse, upstream, ALL, deterministic)
    actual = {
        "out": out[0],
        "lse": lse[0],
        "dq": found.query[0],
        "dlocal": found.local_kv[0, 0],
        "dsink": found.attention_sink,
    }
    if found.sparse_kv is not None:
        actual["dpool"] = found.sparse_kv[0, 0]
    errors = {
        key: float((actual[key].double() - value).norm() / value.norm().clamp(min=1e-30))
        for key, value in wanted.items()
    }
    again = backward(call, bounds, out, lse, upstream, ALL, deterministic)
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)
    return {"check": name, "deterministic": deterministic, "repeats": same, **errors}
