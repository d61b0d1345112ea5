"""A second opinion on the oracle: any kind of call, gathers included, through FlexAttention.

Which rows an index selects is no static mask, so this is no backend: it writes down how often each
token selects each row, ``[B, T, T + S]``, and adds the logarithm to the scores. For small calls.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from csa_dispatch.call import Call

from .plain import visible_table


def flex_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, D]`` in the query's dtype and lse ``[B, H, T]`` by FlexAttention.

    The sink goes in through FlexAttention's lse. NaN and Inf in rows that no token sees do not
    matter; in rows that some token sees they spread to others.
    """
    parts = [call.local_kv] if call.sparse_kv is None else [call.local_kv, call.sparse_kv]
    kv = torch.cat(parts, dim=2).detach()
    table = visible_table(call)
    # Unused places of the table name the row after the last.
    counts = torch.zeros(*table.shape[:2], kv.shape[2] + 1, device=kv.device)
    counts = counts.scatter_add(-1, table, torch.ones_like(table, dtype=counts.dtype))[..., :-1]
    kv = torch.where((counts.sum(1) > 0)[:, None, :, None], kv, 0)
    some = (counts.sum(-1) > 0)[:, None]
    weight = counts.log()
    query = torch.where(some[..., None], call.query.detach(), 0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not compiled, and means not to be
        result, aux = flex.flex_attention(
            query,
            kv,
            kv,
            score_mod=lambda score, b, h, q, row: score + weight[b, q, row],
            scale=call.scale,
            enable_gqa=query.shape[1] != kv.shape[1],
            return_aux=flex.AuxRequest(lse=True),
        )
    assert aux.lse is not None
    lse = total = torch.where(some, aux.lse, -math.inf)
    if call.attention_sink is not None:
        total = torch.logaddexp(lse, call.attention_sink.detach().to(lse.dtype)[:, None])
    share = torch.where(some & total.isfinite(), torch.exp(lse - total), 0)
    return (result * share[..., None]).to(call.query.dtype), total
