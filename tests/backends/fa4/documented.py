"""FA4's two entry points as their documentation has them, in PyTorch, on any device.

Signatures are the real ones (``test_lowering`` compares them). Semantics are those of the
docstrings and of ``softmax.apply_learnable_sink``, quirks included: the sink is folded in
relative to the largest score, NaN rows get an lse of -inf, dsink is exp(sink - lse) by the letter,
and what FA4 leaves unwritten holds NaN. Arguments it would reject, or would pass to a kernel
compiled for something else, are errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
HEAD_DIM = 512


@dataclass
class Recorder:
    """The two entry points, and the arguments they were called with."""

    forwards: list[dict[str, Any]] = field(default_factory=list)
    backwards: list[dict[str, Any]] = field(default_factory=list)

    def forward(
        self,
        q,
        k,
        v,
        qv=None,
        softmax_scale=None,
        learnable_sink=None,
        pack_gqa=None,
        return_lse=False,
        out=None,
        gather_kv_indices=None,
        gather_bwd_recompute_p=False,
    ):
        """``out [B, T, H, D]``, ``lse [B, T, H]``, and for inputs that require gradients p (the
        unnormalised probabilities), row_max (a block of 128 slots each) and o_lo."""
        assert q is None
        assert k is None
        self.forwards.append({"out": out, "indices": gather_kv_indices, "query": qv, "table": v})
        training = qv.requires_grad
        query, table = qv.detach(), v
        batch, tokens, heads, _ = check_operands(query, table, gather_kv_indices)
        if learnable_sink is not None:
            assert learnable_sink.shape == (heads,)
            assert learnable_sink.stride() == (1,)
            assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
        if out is None:
            out = torch.empty_like(query)
        assert out.shape == query.shape
        check_addressable(out)
        lse = torch.full((batch, tokens, heads), math.nan)
        if not table.shape[1] or not query.numel():
            out.zero_()
            lse.fill_(-math.inf)
            if learnable_sink is not None:
                lse.copy_(learnable_sink)
            return out, lse, None, None, None
        keep = training and not gather_bwd_recompute_p
        width = gather_kv_indices.shape[2]
        p = query.new_full((batch, tokens, heads, width), math.nan) if keep else None
        row_max = torch.full((batch, tokens, width // 128, heads), math.nan) if keep else None
        scale_log2 = softmax_scale * LOG2_E
        for b, t, valid, rows in gathered(table, gather_kv_indices):
            scores = (query[b, t].float() @ rows.float().T).masked_fill(~valid, -math.inf)
            largest = scores.max(-1).values
            base = torch.where(largest == -math.inf, 0.0, largest)
            weights = torch.exp2((scores - base[:, None]) * scale_log2)
            total = weights.sum(-1)
            if learnable_sink is not None:
                sink = learnable_sink.float()
                empty = largest == -math.inf
                folded = total + torch.exp2(sink * LOG2_E - largest * scale_log2)
                total = torch.where(empty, 1.0, folded)
                largest = torch.where(empty, sink * (LOG2_E / scale_log2), largest)
            bad = (total == 0) | total.isnan()
            values = weights.to(query.dtype).float() @ rows.float()
            out[b, t] = values * torch.where(bad, 1.0, 1 / total)[:, None]
            known = (largest * scale_log2 + torch.log2(total)) * math.log(2)
            lse[b, t] = torch.where(bad, -math.inf, known)
            if keep:
                running = scores.unflatten(1, (-1, 128)).amax(-1).cummax(1).values
                row_max[b, t] = running.T
                safe = torch.where(running == -math.inf, 0.0, running)[:, :, None]
                blocks = scores.unflatten(1, (-1, 128))
                p[b, t] = torch.exp2((blocks - safe) * scale_log2).flatten(1)
        return out, lse if return_lse or training else None, p, row_max, None

    def backward(
        self,
        q,
        k,
        v,
        qv,
        out,
        dout,
        lse,
        p,
        row_max,
        gather_kv_indices,
        learnable_sink=None,
        softmax_scale=None,
        recompute_p=False,
        token_chunk=None,
        o_lo=None,
    ):
        """``dq, dk`` (None), ``dv`` fp32 ``[B, N, 1, D]``, ``dqv`` like ``qv``, ``dsink``."""
        assert q is None
        assert k is None
        assert o_lo is None
        self.backwards.append(
            {"token_chunk": token_chunk, "dout": dout, "recompute_p": recompute_p}
        )
        assert recompute_p == (p is None) == (row_max is None)
        batch, tokens, heads, _ = check_operands(qv, v, gather_kv_indices)
        assert out.shape == dout.shape == qv.shape
        assert lse.shape == (batch, tokens, heads)
        assert lse.dtype == torch.float32
        assert lse.stride(-1) == 1
        assert token_chunk is None or (batch == 1 and token_chunk > 0), "it would not chunk"
        for tensor in (out, dout):
            check_addressable(tensor)
        dv = torch.zeros(v.shape)
        dqv = torch.empty_like(qv).fill_(math.nan)
        dpsum = (out.float() * dout.float()).sum(-1)
        scale_log2 = softmax_scale * LOG2_E
        lse_log2 = torch.where(lse == -math.inf, 0.0, lse * LOG2_E)
        for b, t, valid, rows in gathered(v, gather_kv_indices):
            if recompute_p:
                exponent = scale_log2 * (qv[b, t].float() @ rows.float().T)
                exponent = (exponent - lse_log2[b, t, :, None]).masked_fill(~valid, -math.inf)
                weights = torch.exp2(exponent)
            else:
                step = torch.exp2(scale_log2 * row_max[b, t].T - lse_log2[b, t, :, None])
                step = torch.where(row_max[b, t].T.isneginf(), 0.0, step)
                weights = p[b, t].float() * step.repeat_interleave(128, dim=1)
            grad = dout[b, t].float()
            dp = (grad @ rows.float().T - dpsum[b, t, :, None]).masked_fill(~valid, 0.0)
            ds = (weights * (dp * softmax_scale)).to(qv.dtype).float()
            dqv[b, t] = ds @ rows.float()
            drows = weights.to(qv.dtype).float().T @ grad + ds.T @ qv[b, t].float()
            used = gather_kv_indices[b, t][valid].long()
            dv[b, :, 0].index_add_(0, used, drows[valid])
        dsink = None
        if learnable_sink is not None:
            share = torch.exp2((learnable_sink.float() - lse) * LOG2_E)
            share = torch.where(lse == -math.inf, 1.0, share)
            dsink = -(share * dpsum).sum((0, 1)).to(learnable_sink.dtype)
        return None, None, dv, dqv, dsink


def check_operands(query: Tensor, table: Tensor, indices: Tensor) -> torch.Size:
    """The shape ``[B, T, H, D]`` of a query whose call the kernels can run."""
    batch, tokens, heads, head_dim = query.shape
    assert 1 <= heads <= 128
    assert query.dtype == table.dtype
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert table.shape == (batch, table.shape[1], 1, HEAD_DIM)
    assert head_dim == HEAD_DIM
    assert indices.shape == (batch, tokens, indices.shape[2])
    assert indices.dtype == torch.int32
    assert indices.is_contiguous()
    assert indices.shape[2] % 128 == 0
    check_addressable(query)
    check_addressable(table)
    return query.shape


def check_addressable(tensor: Tensor) -> None:
    """Unit stride, rows on 16 bytes, nothing expanded: what one compiled kernel serves."""
    assert tensor.data_ptr() % 16 == 0
    assert tensor.stride(-1) == 1
    for dimension, (step, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            assert step > 0
            assert step == 1 if dimension == tensor.ndim - 1 else step % 8 == 0


def gathered(table: Tensor, indices: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Each token with its slots' validity and the gathered rows, zero where unused."""
    length = table.shape[1]
    for b in range(indices.shape[0]):
        for t in range(indices.shape[1]):
            index = indices[b, t].long()
            valid = (index >= 0) & (index < length)
            rows = table[b, :, 0][torch.where(valid, index, 0)]
            yield b, t, valid, rows.masked_fill(~valid[:, None], 0)
