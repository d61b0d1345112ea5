"""Forward: one online softmax over the sink and every segment of every branch."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch.call import Call

from .branch import Branch
from .masking import fill_where, largest
from .products import add_rows_times_keys, add_scores_times_keys, cover_unseen, empty_scores
from .tiles import Tile, accumulate_dtype, tiles
from .workspace import Workspace


def forward(call: Call, branches: list[Branch], workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Output like the query and lse ``[B, H, T]``; see ``Backend.forward``."""
    query = call.query
    batch, heads, tokens, _ = query.shape
    kv_heads = call.local_kv.shape[1]
    dtype = accumulate_dtype(query.dtype)
    output = torch.empty_like(query)
    lse = torch.empty(batch, heads, tokens, dtype=dtype, device=query.device)
    for tile in tiles(call):
        rows = workspace.copy("query", tile.rows_of(query, kv_heads), dtype)
        values = workspace.empty("values", rows.shape, dtype).zero_()
        softmax = OnlineSoftmax(values, sink_of_rows(call, rows))
        for branch in branches:
            _attend(call, branch, tile, rows, softmax, workspace)
        result, result_lse = softmax.finish(sees_a_key(branches, tile, query.device))
        tile.rows_of(output, kv_heads).copy_(result)
        tile.rows_of(lse, kv_heads).copy_(result_lse)
    return output, lse


def _attend(
    call: Call,
    branch: Branch,
    tile: Tile,
    rows: Tensor,
    softmax: OnlineSoftmax,
    workspace: Workspace,
) -> None:
    """Take one branch's keys into the softmax of a tile's query rows."""
    rows_largest = largest(rows)
    for segment in branch.segments(tile):
        logits = empty_scores(workspace, "scores", rows, segment)
        logits.copy_(segment.bias.unsqueeze(-2))
        add_rows_times_keys(logits, rows, segment, call.scale)
        cover_unseen(logits, segment, rows_largest, call.scale, -torch.inf)
        weights = softmax.weights(logits)
        if call.query.dtype != weights.dtype:  # as tensor cores take their operands
            weights.copy_(workspace.copy("rounded", weights, call.query.dtype))
        add_scores_times_keys(softmax.values, weights, segment, 1.0)


def sink_of_rows(call: Call, rows: Tensor) -> Tensor:
    """The sink of each row ``[batches, G, tokens, R, ...]``, -inf when there is none."""
    batches, kv_heads, tokens, heads = rows.shape[:4]
    if call.attention_sink is None:
        return rows.new_full((), -torch.inf).expand(batches, kv_heads, tokens, heads)
    sink = call.attention_sink.to(rows.dtype).view(kv_heads, 1, heads)
    return sink.expand(batches, kv_heads, tokens, heads)


def sees_a_key(branches: list[Branch], tile: Tile, device: torch.device) -> Tensor:
    """Whether each token of the tile sees any key: bool ``[batches, 1, tokens, 1]``."""
    sees = torch.zeros(tile.batches, tile.tokens, dtype=torch.bool, device=device)
    for branch in branches:
        sees = sees | branch.sees_a_key(tile)
    return sees[:, None, :, None]


class OnlineSoftmax:
    """Running maximum, denominator and weighted sum of values, one per query row.

    Starts from the sink: a logit with no value. Segments may come in any number and order;
    their weights times values are for the caller to add to ``values``.

    Args:
        values: zeros ``[batches, G, tokens, R, D]``.
        sink: ``[batches, G, tokens, R]``.
    """

    def __init__(self, values: Tensor, sink: Tensor) -> None:
        self.values = values
        self.sink = sink
        self.peak = torch.where(sink == torch.inf, -torch.inf, sink)  # +inf: see finish
        self.total = (self.peak > -torch.inf).to(values.dtype)

    def weights(self, logits: Tensor) -> Tensor:
        """Turn a segment's logits into weights ``exp(logit - peak)``, in place.

        Args:
            logits: ``[batches, G, blocks, tokens of a block, R, N]``.
        """
        peak = torch.maximum(self.peak, logits.amax(dim=-1).view_as(self.peak))
        shift = _finite_or_zero(peak)
        weights = logits.sub_(shift.view(logits.shape[:-1]).unsqueeze(-1)).exp_()
        faded = (self.peak - shift).exp_()
        self.total = self.total * faded + weights.sum(dim=-1).view_as(faded)
        self.values.mul_(faded.unsqueeze(-1))
        self.peak = peak
        return weights

    def finish(self, sees_a_key: Tensor) -> tuple[Tensor, Tensor]:
        """Output and lse ``[batches, G, tokens, R, (D)]``.

        A row that sees no key has output 0 and the sink as lse, whatever its query holds, and
        so has a row whose sink is +inf: the limit of a growing sink.
        """
        weighs = sees_a_key & (self.sink != torch.inf)
        values = self.values.div_(self.total.unsqueeze(-1))
        lse = self.total.log().add_(_finite_or_zero(self.peak))
        fill_where(values, ~weighs, 0)
        return values, torch.where(weighs, lse, self.sink)


def _finite_or_zero(peak: Tensor) -> Tensor:
    """Keep -inf - -inf, of rows that have seen no key yet, from being NaN."""
    return torch.where(peak == -torch.inf, 0, peak)
