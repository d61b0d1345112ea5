"""Mutants: the operation with one fault each, to prove that the parity suite can fail.

A mutant is a ``Backend`` over the plain implementation that is handed a tampered call, or whose
results are tampered with. Every one stands for a fault that some implementation shipped. A suite
of cases that lets one of them pass is not worth running.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from csa_dispatch.backend import Backend
from csa_dispatch.call import Call, Gradients, Kind
from csa_dispatch.capabilities import Capabilities

from .plain import plain_forward, plain_gradients

Needs = tuple[bool, bool, bool, bool]


def _same_call(call: Call) -> Call:
    return call


def _same_forward(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    del call
    return output, lse


def _same_gradients(call: Call, gradients: Gradients) -> Gradients:
    del call
    return gradients


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: a word or three for it.
        call: what the implementation sees instead of the call.
        results: what becomes of output and lse.
        gradients: what becomes of the gradients.
    """

    name: str
    call: Callable[[Call], Call] = _same_call
    results: Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]] = _same_forward
    gradients: Callable[[Call, Gradients], Gradients] = _same_gradients


class PlainBackend(Backend):
    """Plain eager PyTorch as a backend, with a fault built in unless ``mutation`` is None."""

    summary = "plain eager PyTorch, for tests"
    forward_capabilities = Capabilities()
    backward_capabilities = Capabilities()

    def __init__(self, mutation: Mutation | None = None) -> None:
        self._mutation = mutation or Mutation("plain")
        self.name = self._mutation.name

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = plain_forward(self._mutation.call(call))
        output, lse = self._mutation.results(call, output, lse)
        return torch.empty_like(call.query).copy_(output), lse.contiguous()

    def backward(
        self, call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, needs: Needs
    ) -> Gradients:
        del output, lse
        altered = self._mutation.call(call)
        found = self._mutation.gradients(call, plain_gradients(altered, grad_output))
        if altered.attention_sink is None and call.attention_sink is not None:
            found = found._replace(attention_sink=torch.zeros_like(call.attention_sink))
        return Gradients(
            *(item if wanted else None for item, wanted in zip(found, needs, strict=True))
        )


def _indices(change: Callable[[Call, Tensor], Tensor]) -> Callable[[Call], Call]:
    """A tampered call whose ``kv_indices``, if any, went through ``change``."""

    def alter(call: Call) -> Call:
        if call.kv_indices is None:
            return call
        return call._replace(kv_indices=change(call, call.kv_indices))

    return alter


def _pool(call: Call) -> int:
    return 0 if call.sparse_kv is None else call.sparse_kv.shape[2]


def _one_document(call: Call) -> Call:
    """Offsets replaced by one document over everything, ids by a single one."""
    if call.doc_ids is not None:
        return call._replace(doc_ids=torch.zeros_like(call.doc_ids))
    if call.cu_seqlens is None:
        return call
    whole = call.cu_seqlens.new_tensor([0, call.query.shape[2]])
    return call._replace(cu_seqlens=whole, cu_seqlens_k=whole.new_tensor([0, _pool(call)]))


def _pool_unpacked(call: Call) -> Call:
    """Slots taken as rows of the whole pool, though the window keeps its documents."""
    if call.cu_seqlens is None or call.kind is not Kind.GATHER:
        return call
    lengths = (call.cu_seqlens[1:] - call.cu_seqlens[:-1]).long()
    ids = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    spare = call.query.shape[2] - len(ids)
    ids = torch.cat([ids, ids.new_full((spare,), len(lengths))])
    return call._replace(cu_seqlens=None, cu_seqlens_k=None, doc_ids=ids[None])


def _collapse_duplicates(call: Call, indices: Tensor) -> Tensor:
    del call
    ordered, place = indices.sort(dim=-1, stable=True)
    repeat = torch.zeros_like(ordered, dtype=torch.bool)
    repeat[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = ordered.masked_fill(repeat, -1)
    return torch.empty_like(indices).scatter_(-1, place, ordered)


def _compact(call: Call, indices: Tensor) -> Tensor:
    """The number of valid slots taken for a length: unused slots are thought to come last."""
    valid = (indices >= 0) & (indices < _pool(call))
    column = torch.arange(indices.shape[-1], device=indices.device)
    return indices.masked_fill(column >= valid.sum(-1, keepdim=True), -1)


def _swap_groups(call: Call) -> Call:
    """Query head ``h`` reads KV head ``h % G`` instead of ``h // (H // G)``."""
    groups, heads = call.local_kv.shape[1], call.query.shape[1]
    order = torch.arange(heads, device=call.query.device) % groups

    def spread(kv: Tensor | None) -> Tensor | None:
        return None if kv is None else kv[:, order]

    local = call.local_kv[:, order]
    return call._replace(local_kv=local, sparse_kv=spread(call.sparse_kv))


def _fold_groups(call: Call, gradients: Gradients) -> Gradients:
    """The KV gradients of ``_swap_groups``, summed back into the KV heads."""
    groups = call.local_kv.shape[1]

    def fold(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.unflatten(1, (-1, groups)).sum(1)

    return gradients._replace(
        local_kv=fold(gradients.local_kv), sparse_kv=fold(gradients.sparse_kv)
    )


def _leak_stale_rows(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Weight 0 times whatever an unselected row holds, added to every row."""
    rows = call.local_kv if call.sparse_kv is None else call.sparse_kv
    return output + 0 * rows.sum(2, keepdim=True).sum(1, keepdim=True), lse


def _drop_window_start(call: Call) -> Call:
    return call._replace(sliding_window_size=max(0, call.sliding_window_size - 1))


def _empty_rows_nan(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """0 / 0 in rows whose denominator is 0."""
    del call
    return torch.where(lse[..., None] == -math.inf, math.nan, output), lse


def _without_sink(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return output, plain_forward(call._replace(attention_sink=None))[1]


def _round_sink(call: Call) -> Call:
    sink = call.attention_sink
    return call._replace(attention_sink=None if sink is None else sink.to(torch.bfloat16).to(sink))


def _scale_sink(call: Call) -> Call:
    sink = call.attention_sink
    return call._replace(attention_sink=None if sink is None else sink * call.scale)


def _times(field: str, factor: float) -> Callable[[Call, Gradients], Gradients]:
    def alter(call: Call, gradients: Gradients) -> Gradients:
        del call
        grad = getattr(gradients, field)
        return gradients if grad is None else gradients._replace(**{field: grad * factor})

    return alter


def _halve_kv(call: Call, gradients: Gradients) -> Gradients:
    halved = _times("local_kv", 0.5)(call, gradients)
    return _times("sparse_kv", 0.5)(call, halved)


def _first_batch_slots(call: Call, indices: Tensor) -> Tensor:
    del call
    return indices[:1].expand_as(indices)


def _ratio_ceiling(call: Call) -> Call:
    """A compressed entry visible one token before it is complete."""
    if call.compress_ratio is None or call.compress_ratio == 1:
        return call
    return call._replace(compress_ratio=call.compress_ratio - 1)


def _late_heads(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Only the first tile of 16 heads computed right; later ones repeat it."""
    heads = torch.arange(output.shape[1], device=output.device) % 16
    return output[:, heads], lse


def _late_columns(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing written past column 64."""
    del call
    return torch.cat([output[..., :64], torch.zeros_like(output[..., 64:])], -1), lse


def _nearest(call: Call, indices: Tensor) -> Tensor:
    return indices.clamp(max=max(0, _pool(call) - 1))


def _wrap_negative(call: Call, indices: Tensor) -> Tensor:
    """Negative indices counted from the end, as Python does."""
    pool = _pool(call)
    return torch.where((indices < 0) & (indices >= -pool), indices + pool, indices)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("sink dropped", call=lambda c: c._replace(attention_sink=None)),
    Mutation("sink scaled", call=_scale_sink),
    Mutation("sink rounded to bfloat16", call=_round_sink),
    Mutation("sink gradient zero", gradients=_times("attention_sink", 0.0)),
    Mutation("sink gradient negated", gradients=_times("attention_sink", -1.0)),
    Mutation(
        "window one longer",
        call=lambda c: c._replace(sliding_window_size=c.sliding_window_size + 1),
    ),
    Mutation("window one shorter", call=_drop_window_start),
    Mutation("document bounds ignored", call=_one_document),
    Mutation("pool offsets ignored", call=_pool_unpacked),
    Mutation("duplicates collapsed", call=_indices(_collapse_duplicates)),
    Mutation("dKV halved", gradients=_halve_kv),
    Mutation("dquery without scale", gradients=lambda c, g: _times("query", 1 / c.scale)(c, g)),
    Mutation("scale ignored", call=lambda c: c._replace(scale=1.0)),
    Mutation("lse in base 2", results=lambda _, o, lse: (o, lse / math.log(2))),
    Mutation("lse without sink", results=_without_sink),
    Mutation("stale NaN rows leaking", results=_leak_stale_rows),
    Mutation("empty rows NaN", results=_empty_rows_nan),
    Mutation("index 0 unused", call=_indices(lambda _, i: i.masked_fill(i == 0, -1))),
    Mutation("filler clamped to the last row", call=_indices(_nearest)),
    Mutation("negative index wraps", call=_indices(_wrap_negative)),
    Mutation("validity by column", call=_indices(_compact)),
    Mutation("last slot dropped", call=_indices(lambda _, i: i[..., : max(0, i.shape[-1] - 1)])),
    Mutation("first batch's slots for all", call=_indices(_first_batch_slots)),
    Mutation("KV heads interleaved", call=_swap_groups, gradients=_fold_groups),
    Mutation("entries counted early", call=_ratio_ceiling),
    Mutation("heads past the first tile repeated", results=_late_heads),
    Mutation("columns past 64 unwritten", results=_late_columns),
    Mutation("output one percent off", results=lambda _, o, lse: (o * 1.01, lse)),
)
"""Every fault, those that DESIGN names first among their like."""


def mutants() -> list[PlainBackend]:
    """One backend for each of ``MUTATIONS``."""
    return [PlainBackend(mutation) for mutation in MUTATIONS]
