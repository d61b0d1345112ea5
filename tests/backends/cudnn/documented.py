"""cuDNN's two sparse attention functions as their documentation has them, on any device.

Semantics are those of the docstrings of nvidia-cudnn-frontend 1.32: lse leaves the sink out, a row
without keys has lse +inf in the forward, and in the backward the sink is added back by logaddexp.
Arguments it would reject, or would have to copy first, are errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HEAD_DIM = 512


@dataclass
class Recorder:
    """The two functions, and the arguments they were called with.

    Attributes:
        hopper: whether they behave as on SM90, which has no forward and no determinism.
    """

    hopper: bool = False
    forwards: list[dict[str, Any]] = field(default_factory=list)
    backwards: list[dict[str, Any]] = field(default_factory=list)

    def forward(self, q, kv, topk_idxs, *, attn_sink=None, topk_length=None, softmax_scale=None):
        """out ``[T, H, D]``, lse ``[T, H]`` without the sink."""
        assert not self.hopper
        assert q.shape[1] in (64, 128)
        assert topk_length is None
        self.forwards.append({"q": q, "kv": kv, "topk_idxs": topk_idxs})
        check_operands(q, kv, topk_idxs)
        check_sink(q, attn_sink)
        tokens, heads, _ = q.shape
        out = torch.full_like(q, math.nan)
        lse = q.new_full((tokens, heads), math.nan, dtype=torch.float32)
        for t in range(tokens):
            rows = gathered(kv, topk_idxs[t], None)[1].float()
            if not rows.shape[0]:
                out[t], lse[t] = 0, math.inf
                continue
            scores = softmax_scale * (q[t].float() @ rows.T)
            lse[t] = torch.logsumexp(scores, -1)
            total = lse[t] if attn_sink is None else torch.logaddexp(lse[t], attn_sink)
            weights = torch.exp(scores - total[:, None])
            out[t] = weights.to(q.dtype).float() @ rows
        return {"out": out, "lse": lse}

    def backward(
        self,
        q,
        kv,
        out,
        dout,
        lse,
        attn_sink,
        topk_idxs,
        softmax_scale=None,
        topk_length=None,
        deterministic=False,
        q_cluster_mode="off",
    ):
        """dq and dkv in the inputs' dtype, d_sink fp32."""
        assert q_cluster_mode == "off"
        self.backwards.append(
            {"q": q, "kv": kv, "out": out, "dout": dout, "deterministic": deterministic}
        )
        check_operands(q, kv, topk_idxs)
        check_sink(q, attn_sink)
        tokens, heads, _ = q.shape
        if self.hopper:
            assert heads > 1
            assert not deterministic
        else:
            assert heads in (16, 32, 64, 128)
            assert topk_length is None, "it would read every slot before the length"
        for tensor in (out, dout):
            assert tensor.shape == q.shape
            assert tensor.dtype == q.dtype
            assert tensor.is_contiguous()
        assert lse.shape == (tokens, heads)
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        delta = (out.float() * dout.float()).sum(-1)
        total = torch.where(lse == -math.inf, 0.0, lse)
        infinite = torch.maximum(total, attn_sink).isinf()
        total = torch.where(
            infinite, torch.maximum(total, attn_sink), torch.logaddexp(total, attn_sink)
        )
        share = 1 / (1 + torch.exp(lse - attn_sink))
        share = torch.where(lse == math.inf, 0.0, share)
        share = torch.where(lse == attn_sink, 0.5, share)
        dq = torch.zeros_like(q)
        dkv = torch.zeros(kv.shape)
        for t in range(tokens):
            length = None if topk_length is None else int(topk_length[t])
            used, rows = gathered(kv, topk_idxs[t], length)
            rows, grad = rows.float(), dout[t].float()
            weights = torch.exp(softmax_scale * (q[t].float() @ rows.T) - total[t, :, None])
            scores = (weights * (grad @ rows.T - delta[t, :, None])).to(q.dtype).float()
            dq[t] = softmax_scale * (scores @ rows)
            drows = weights.to(q.dtype).float().T @ grad
            dkv.index_add_(0, used, drows + softmax_scale * (scores.T @ q[t].float()))
        return {"dq": dq, "dkv": dkv.to(kv.dtype), "d_sink": -(share * delta).sum(0)}


def check_operands(q: Tensor, kv: Tensor, topk_idxs: Tensor) -> None:
    """What the kernels address without a copy."""
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert kv.dtype == q.dtype
    assert q.shape[2] == HEAD_DIM
    assert kv.shape == (kv.shape[0], HEAD_DIM)
    assert topk_idxs.dtype == torch.int32
    assert topk_idxs.shape[0] == q.shape[0]
    assert topk_idxs.shape[1] % 128 == 0
    for tensor in (q, kv, topk_idxs):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0


def check_sink(q: Tensor, sink: Tensor | None) -> None:
    if sink is not None:
        assert sink.dtype == torch.float32
        assert sink.shape == (q.shape[1],)
        assert sink.is_contiguous()


def gathered(kv: Tensor, indices: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
    """The used slots of a token, and their rows."""
    chosen = indices[:length].long()
    used = chosen[(chosen >= 0) & (chosen < kv.shape[0])]
    return used, kv[used]
