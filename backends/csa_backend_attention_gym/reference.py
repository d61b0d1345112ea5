"""Calls of Attention Gym's reference that keep our semantics.

Three departures are closed here (versions 0.0.14 to 0.0.17):

- Its path without offsets multiplies unselected rows by zero, so NaN in them leaks. We always
  give offsets (a batch row is one document): that path masks before it multiplies.
- With offsets KV gradients accumulate in the input dtype, and fp16 intermediates overflow. We
  compute in fp32 and cast the results once.
- A sink of +inf gives NaN, and rows past the last offset see each other. Both are masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch import Call, Gradients, Kind, enable_autograd, token_bounds


def _rows_with_keys(call: Call) -> Tensor:
    """``[B, T]`` bool: the row sees at least one key."""
    query = call.query
    bounds = token_bounds(call)
    batch, tokens = query.shape[0], query.shape[2]
    position = torch.arange(tokens, device=query.device)
    start = 0 if bounds is None else bounds.window_start
    seen = (position - start >= 0) & (call.sliding_window_size > 0)
    seen = seen.expand(batch, tokens)
    if call.kind is Kind.DENSE:
        assert bounds is not None
        assert bounds.pool_start is not None
        assert bounds.pool_end is not None
        seen = seen | (bounds.pool_end > bounds.pool_start)
    elif call.kv_indices is not None:
        assert call.sparse_kv is not None
        length: Tensor | int = call.sparse_kv.shape[2]
        if bounds is not None:
            assert bounds.pool_start is not None
            assert bounds.pool_end is not None
            length = (bounds.pool_end - bounds.pool_start)[..., None]
        seen = seen | ((call.kv_indices >= 0) & (call.kv_indices < length)).any(-1)
    return seen


def _indices(call: Call, batch: int) -> Tensor:
    """Document-local ``[1, T, K]`` slots of one batch row, for any kind."""
    tokens = call.query.shape[2]
    if call.kind is Kind.WINDOW:
        return torch.zeros(1, tokens, 0, dtype=torch.int32, device=call.query.device)
    if call.kv_indices is not None:
        return call.kv_indices[batch : batch + 1]
    bounds = token_bounds(call)
    assert bounds is not None
    assert bounds.pool_start is not None
    assert bounds.pool_end is not None
    assert call.sparse_kv is not None
    entry = torch.arange(call.sparse_kv.shape[2], device=call.query.device, dtype=torch.int32)
    count = (bounds.pool_end - bounds.pool_start)[batch]
    return torch.where(entry < count[:, None], entry, -1)[None]


def _offsets(call: Call) -> tuple[Tensor, Tensor]:
    device, tokens = call.query.device, call.query.shape[2]
    pool = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    cu_seqlens, cu_seqlens_k = call.cu_seqlens, call.cu_seqlens_k
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    if cu_seqlens_k is None:
        documents = cu_seqlens.shape[0]
        cu_seqlens_k = torch.zeros(documents, dtype=torch.int32, device=device)
        cu_seqlens_k[-1] = pool if call.cu_seqlens is None else 0
    # Spans are cut to the pool, as ``token_bounds`` does; the library would read past it.
    # Where a document began before row 0 does not matter to it: slots are given.
    return cu_seqlens.clamp(min=0), cu_seqlens_k.clamp(max=pool)


class _Inputs:
    """fp32 (fp64) copies of the four differentiable inputs, masked where nothing may be read."""

    def __init__(self, call: Call) -> None:
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        seen = _rows_with_keys(call)
        if call.cu_seqlens is None:
            inside = torch.ones_like(seen)
        else:
            position = torch.arange(seen.shape[1], device=seen.device)
            inside = (position < call.cu_seqlens[-1])[None]
        self.seen = seen[:, None, :, None]
        # Rows no document holds see each other in the reference: make that harmless.
        self.query = call.query.to(dtype).masked_fill(~self.seen, 0)
        self.local_kv = call.local_kv.to(dtype).masked_fill(~inside[:, None, :, None], 0)
        sparse_kv = call.sparse_kv
        if sparse_kv is None:
            sparse_kv = call.local_kv[:, :, :0]
        self.sparse_kv = sparse_kv.detach().to(dtype)
        sink = call.attention_sink
        heads = call.query.shape[1]
        if sink is None:
            sink = torch.full((heads,), float("-inf"), device=seen.device)
        self.infinite = torch.isposinf(sink)
        self.sink = sink.to(dtype).clamp(max=torch.finfo(dtype).max / 4)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.query, self.local_kv, self.sparse_kv, self.sink


def _run(call: Call, inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """Output and lse of the masked inputs, differentiable in ``inputs.leaves()``."""
    from attn_gym.sparse.gather_attn import AuxRequest, gather_attn

    cu_seqlens, cu_seqlens_k = _offsets(call)
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    for batch in range(call.query.shape[0]):
        row = slice(batch, batch + 1)
        output, aux = gather_attn(
            inputs.query[row],
            inputs.local_kv[row],
            inputs.sparse_kv[row],
            _indices(call, batch),
            inputs.sink,
            sliding_window_size=call.sliding_window_size,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            impl="reference",
            scale=call.scale,
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None
        outputs.append(output)
        lses.append(aux.lse)
    return torch.cat(outputs), torch.cat(lses)


def reference_call(call: Call) -> tuple[Tensor, Tensor]:
    """Output (query dtype) and lse of the call; see ``csa_dispatch.Backend.forward``."""
    inputs = _Inputs(call)
    result, lse = _run(call, inputs)
    result = torch.where(inputs.seen, result, 0)
    sink = call.attention_sink
    empty_lse = float("-inf") if sink is None else sink.to(lse.dtype)[None, :, None]
    lse = torch.where(inputs.seen[..., 0], lse, empty_lse)
    lse = lse.masked_fill(inputs.infinite[None, :, None], float("inf"))
    output = torch.empty_like(call.query)
    output.copy_(result)
    return output, lse.contiguous()


def reference_gradients(
    call: Call, grad_output: Tensor, needs: tuple[bool, bool, bool, bool]
) -> Gradients:
    """Gradients through the reference's own autograd, recomputing its forward."""
    inputs = _Inputs(call)
    leaves = inputs.leaves()
    wanted = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
    with enable_autograd():
        for leaf in wanted:
            leaf.requires_grad_()
        output, _ = _run(call, inputs)
        upstream = torch.where(inputs.seen, grad_output.to(output.dtype), 0)
        found = iter(torch.autograd.grad(output, wanted, upstream))
    originals = (call.query, call.local_kv, call.sparse_kv, call.attention_sink)
    results: list[Tensor | None] = []
    for position, (original, needed) in enumerate(zip(originals, needs, strict=True)):
        if not needed or original is None:
            results.append(None)
            continue
        gradient = next(found)
        if position == 0:
            gradient = torch.where(inputs.seen, gradient, 0)
        if position == 3:
            gradient = gradient.masked_fill(inputs.infinite, 0)
        results.append(gradient.to(original.dtype))
    return Gradients(*results)
