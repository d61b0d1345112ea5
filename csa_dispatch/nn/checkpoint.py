"""A layer's tensors in a checkpoint, by transformers' names or the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..validation import check_flag, fail
from ..wording import a_kind
from .attention import CompressedSparseAttention
from .checks import check_int

_PUBLISHED = {
    "q_a_proj.": "wq_a.",
    "q_a_norm.": "q_norm.",
    "q_b_proj.": "wq_b.",
    "kv_proj.": "wkv.",
    "kv_norm.": "kv_norm.",
    "o_a_proj.": "wo_a.",
    "o_b_proj.": "wo_b.",
    "sinks": "attn_sink",
    "compressor.kv_proj.": "compressor.wkv.",
    "compressor.gate_proj.": "compressor.wgate.",
    "compressor.position_bias": "compressor.ape",
    "compressor.kv_norm.": "compressor.norm.",
    "compressor.indexer.kv_proj.": "indexer.compressor.wkv.",
    "compressor.indexer.gate_proj.": "indexer.compressor.wgate.",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
    "compressor.indexer.kv_norm.": "indexer.compressor.norm.",
    "compressor.indexer.q_b_proj.": "indexer.wq_b.",
    "compressor.indexer.scorer.weights_proj.": "indexer.weights_proj.",
}
"""Our names, which are transformers' own, and those of the published checkpoints."""

_SHARDED = {"q_b_proj.weight": 0, "sinks": 0, "o_a_proj.weight": 0, "o_b_proj.weight": 1}
"""The dimension along which tensor-parallel ranks share a tensor."""


_CONFIG = "Make the layer from the config that from_deepseek_v4 gives for it."


def load_layer(
    layer: CompressedSparseAttention,
    tensors: Mapping[str, Tensor],
    number: int,
    *,
    tp_rank: int = 0,
) -> None:
    """Copy the attention tensors of one layer of a checkpoint into ``layer``: all, or none.

    Args:
        layer: of the config that ``from_deepseek_v4`` gives for it. With ``dense=True`` the
            checkpoint's indexer is left out.
        tensors: by name, transformers' (``model.layers.3.self_attn.kv_proj.weight``) or the
            published checkpoints' (``layers.3.attn.wkv.weight``), with or without the prefix
            ``model.``; those of other layers, and of other parts of this one, are ignored.
        number: of the layer in the model.
        tp_rank: which share of the heads this layer holds, with ``tp_size`` above 1.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there is no such tp_rank or number; or the tensors do not fit. The message
            lists all that are missing, unexpected, of another shape, quantised or without
            values, and the layer is as it was.
    """
    _check_layer(layer, number)
    if not isinstance(tensors, Mapping):
        remedy = "Pass a state dict, or what load_file of safetensors gives."
        fail("tensors", a_kind(tensors), "a mapping by name", remedy, TypeError)
    remedy = f"The layer's tp_size is {layer.tp_size}."
    check_int("tp_rank", tp_rank, 0, layer.tp_size - 1, remedy)
    found: list[tuple[Tensor, Tensor]] = []
    faults: list[_Fault] = []
    unread = set(_attention_names(layer, tensors, number))
    for name, parameter in layer.named_parameters():
        keys = [key for key in _candidates(name, number) if key in tensors]
        unread.difference_update(keys)
        if not keys:
            text = f"missing: {_own(name, number)} ({_published(name, number)})"
            faults.append(_Fault(text, "Pass the tensors of every file that holds the layer."))
            continue
        tensor, dim = tensors[keys[0]], _SHARDED.get(name)
        wanted = [
            size * layer.tp_size if axis == dim else size
            for axis, size in enumerate(parameter.shape)
        ]
        faults += _faults(keys[0], tensor, wanted)
        if parameter.is_meta:
            text = f"{name} of the layer is on the meta device; it must have memory"
            faults.append(_Fault(text, "Call layer.to_empty(device=...) first."))
        if not faults:
            share = tensor if dim is None else tensor.chunk(layer.tp_size, dim=dim)[tp_rank]
            found.append((parameter, share))
    faults += (_Fault(f"unexpected: {key}", _CONFIG) for key in sorted(unread))
    if faults:
        lines = "".join(f"\n  {fault.text}" for fault in faults)
        remedies = " ".join(dict.fromkeys(fault.remedy for fault in faults))
        raise ValueError(
            f"tensors do not fit the layer as its number {number}, and none was loaded:{lines}\n"
            f"{remedies}"
        )
    with torch.no_grad():
        for parameter, share in found:
            parameter.copy_(share)


def layer_tensors(
    layer: CompressedSparseAttention, number: int, *, published: bool = False
) -> dict[str, Tensor]:
    """The tensors of ``layer`` by the names of a checkpoint: the reverse of ``load_layer``.

    Args:
        layer: a whole one, of tp_size 1.
        number: of the layer in the model.
        published: the published checkpoints' names instead of transformers'.
    """
    _check_layer(layer, number)
    check_flag("published", published)
    if layer.tp_size != 1:
        remedy = "Gather the shares of all ranks in a layer of tp_size 1."
        fail("layer", f"of tp_size {layer.tp_size}", "whole, of tp_size 1", remedy)
    form = _published if published else _own
    return {form(name, number): tensor for name, tensor in layer.state_dict().items()}


def _check_layer(layer: CompressedSparseAttention, number: int) -> None:
    if not isinstance(layer, CompressedSparseAttention):
        actual, required = a_kind(layer), "a CompressedSparseAttention"
        fail("layer", actual, required, "Pass the attention layer alone.", TypeError)
    check_int("number", number, 0, remedy="Pass the layer's number in the model, from 0.")


class _Fault(NamedTuple):
    """One thing that keeps a checkpoint from being loaded, and what to do about it."""

    text: str
    remedy: str


def _faults(name: str, tensor: Any, wanted: list[int]) -> Iterator[_Fault]:
    """The faults of a checkpoint's tensor of this name."""
    if not isinstance(tensor, Tensor):
        yield _Fault(f"{name} is {a_kind(tensor)}; it must be a torch.Tensor", "Read it first.")
        return
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        text = f"{name} is {tensor.dtype}; it must be float16 or wider"
        yield _Fault(text, "Dequantise the checkpoint first.")
    if tensor.is_meta:
        text = f"{name} is on the meta device; it must have values"
        yield _Fault(text, "Read tensors from their files.")
    if list(tensor.shape) != wanted:
        yield _Fault(f"{name} is of shape {list(tensor.shape)}; it must be of {wanted}", _CONFIG)


def _attention_names(
    layer: CompressedSparseAttention, tensors: Mapping[str, Tensor], number: int
) -> Iterator[str]:
    """Names of the checkpoint that belong to the layer's attention, by their beginning."""
    for key in tensors:
        name = key.removeprefix("model.")
        for part in ("self_attn.", "attn."):
            inside = name.removeprefix(f"layers.{number}.{part}")
            left_out = layer.config.dense and inside.removeprefix("compressor.").startswith(
                "indexer."
            )
            if inside != name and not left_out:
                yield key


def _candidates(name: str, number: int) -> Iterator[str]:
    """Names that a checkpoint may have for one of ours."""
    published = _published(name, number)
    # transformers saves the published names below its own prefix, and the KV norm as "norm".
    saved = published.replace(".attn.kv_norm.", ".attn.norm.")
    for candidate in (_own(name, number), f"model.{published}", f"model.{saved}"):
        yield candidate
        yield candidate.removeprefix("model.")


def _own(name: str, number: int) -> str:
    return f"model.layers.{number}.self_attn.{name}"


def _published(name: str, number: int) -> str:
    ours = max((key for key in _PUBLISHED if name.startswith(key)), key=len)
    return f"layers.{number}.attn.{_PUBLISHED[ours]}{name.removeprefix(ours)}"
