"""cuDNN's indexer scores and top-k as their documentation has them, on any device.

Semantics are those of the docstrings of nvidia-cudnn-frontend 1.32, restricted to packed calls and
deterministic top-k. Arguments that it would reject, or would have to copy first, are errors. What
the documentation leaves open is NaN here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ratio: int = 4,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_causal_offsets: Tensor | None = None,
) -> dict[str, Tensor]:
    """fp32 ``[T, max_seqlen_k]``; rows of no document are left open."""
    assert q.dtype == k.dtype == torch.bfloat16
    assert w.dtype in (torch.bfloat16, torch.float32)
    total, heads, head_dim = q.shape
    assert heads in (4, 8, 16, 32, 64)
    assert head_dim == 128
    assert k.shape == (k.shape[0], 1, head_dim)
    assert w.shape == (total, heads)
    for tensor in (q, k, w):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert max_seqlen_k % 4 == 0, "it would copy the scores"
    for tensor in (cu_seqlens_q, cu_seqlens_k, q_causal_offsets):
        assert tensor is not None
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    tokens, entries, before = (
        tensor.tolist() for tensor in (cu_seqlens_q, cu_seqlens_k, q_causal_offsets)
    )
    assert len(tokens) == len(entries) == len(before) + 1
    assert tokens[-1] <= total
    assert entries[-1] <= k.shape[0]
    found = torch.full((total, max_seqlen_k), math.nan)
    for document, past in enumerate(before):
        assert past >= 0
        first, last = tokens[document : document + 2]
        assert 0 <= last - first <= max_seqlen_q
        keys = k[entries[document] : entries[document + 1], 0].float()
        products = torch.einsum("thd,sd->ths", q[first:last].float(), keys)
        # The kernels' maximum takes NaN for 0.
        products = products.nan_to_num(0, math.inf, -math.inf).clamp(min=0)
        sums = torch.einsum("ths,th->ts", products, w[first:last].float())
        complete = (past + torch.arange(last - first) + 1) // ratio
        sums[torch.arange(len(keys)) >= complete[:, None]] = -math.inf
        width = min(len(keys), max_seqlen_k)
        found[first:last] = -math.inf
        found[first:last, :width] = sums[:, :width]
    return {"scores": found}


def top_k(
    input_values: Tensor,
    seq_lens: Tensor,
    top_k: int,
    return_val: bool = True,
    deterministic: bool = False,
) -> dict[str, Tensor | None]:
    """int32 ``[T, top_k]``: ascending, the lowest of equals, then -1; 0.0 is above -0.0."""
    assert deterministic
    assert not return_val
    rows, columns = input_values.shape
    assert 0 < top_k <= 2048
    assert rows > 0
    assert columns > 0
    assert seq_lens.shape == (rows,)
    assert seq_lens.dtype == torch.int32
    found = torch.full((rows, top_k), -1, dtype=torch.int32)
    for row, length in enumerate(seq_lens.tolist()):
        assert 0 <= length <= columns
        values = input_values[row, :length]
        sign = torch.copysign(torch.tensor(0.5), values)
        order = sorted(range(length), key=lambda place: (-values[place], -sign[place], place))
        chosen = torch.tensor(sorted(order[:top_k]), dtype=torch.int32)
        found[row, : len(chosen)] = chosen
    return {"indices": found, "values": None}
