"""The forward of transformers' V4 model without its dense mask, and what it must refuse."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...reasons import BackendRefused, Reason
from .left_padding import is_padded, pad_cache

CACHE_LAYER = ("store_compression_weights", "update_compressor_states")


def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepseekV4Model.forward`` with its attention layers enabled.

    Raises:
        BackendRefused: masks, positions or caches that the layers cannot honour; the Reason says
            what to do.
    """
    forward = type(self).forward
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    kwargs.update(zip(names, args, strict=False))
    if kwargs.get("output_attentions", self.config.output_attentions):
        remedy = "No attention weights are formed; disable() first."
        _refuse("output_attentions", "True", "False", remedy)
    inputs = _first(kwargs, "input_ids", "inputs_embeds")
    if inputs is not None:
        _check_inputs("inputs_embeds" if kwargs.get("input_ids") is None else "input_ids", inputs)
        kwargs.update(_for_the_layers(self.config, inputs, kwargs))
    # transformers takes a dict's mask as it is, and None for none at all.
    kwargs["attention_mask"] = {"sliding_attention": None}
    return forward(self, **kwargs)


def _first(kwargs: dict[str, Any], *names: str) -> Any:
    """The first of these arguments that is given."""
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def _refuse(field: str, actual: str, required: str, remedy: str) -> NoReturn:
    reason = Reason(field, actual, required, remedy)
    raise BackendRefused(
        "this call of an enabled DeepSeek-V4 model cannot run through attention()",
        {"transformers": (reason,)},
    )


def _check_inputs(name: str, inputs: Tensor) -> None:
    shape = "[B, T]" if name == "input_ids" else "[B, T, hidden_size]"
    if inputs.ndim != shape.count(",") + 1 or 0 in inputs.shape:
        remedy = "Pass at least one token of at least one row, a single row as a batch of one."
        _refuse(name, f"of shape {list(inputs.shape)}", f"{shape} of positive sizes", remedy)


def _for_the_layers(config: Any, inputs: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Checks a call and returns the arguments that padding on the left or packing changes."""
    cache = _first(kwargs, "cache", "past_key_values")
    batch, tokens = inputs.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    total = _left_padding(kwargs.get("attention_mask"), cache, batch, past, tokens)
    if cache is not None and not is_padded(cache):
        _check_cache(cache, config)
    positions = torch.arange(past, past + tokens, device=inputs.device)[None]
    if total is None:
        given = kwargs.get("position_ids")
        documents = _packed(given) if cache is None else None
        if documents is None:
            _check_positions(given, positions)
            return {}
        return {"documents": documents, "use_cache": False}
    positions = positions - torch.tensor(total, device=inputs.device)[:, None]
    _check_positions(kwargs.get("position_ids"), positions)
    if cache is None and _uses_cache(config, kwargs):
        cache = import_module("transformers").DynamicCache(config=config)
    if cache is not None:
        if not is_padded(cache):
            pad_cache(cache, batch)
        for layer in cache.layers:
            layer.padding = total
    return {
        "cache": cache,
        "position_ids": positions.clamp(min=0),
        "padding": [min(max(rows - past, 0), tokens) for rows in total],
    }


def _uses_cache(config: Any, kwargs: dict[str, Any]) -> bool:
    chosen = kwargs.get("use_cache")
    return config.use_cache if chosen is None else chosen


def _left_padding(mask: Any, cache: Any, batch: int, past: int, tokens: int) -> list[int] | None:
    """Tokens of padding that each row began with; None without any.

    Padding behind the tokens is let through where no later call would see it.
    """
    known = cache.layers[0].padding if is_padded(cache) else None
    if mask is None:
        return known
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        _refuse(
            "attention_mask",
            f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__,
            "a padding mask [B, T], or None",
            "The layers are causal by themselves; leave attention_mask out.",
        )
    if mask.shape != (batch, past + tokens):
        required = f"[{batch}, {past + tokens}], a row for each of the batch"
        remedy = "Pass the tokenizer's mask of these rows, or leave attention_mask out."
        if past:
            required += f" and a column for each of {past} cached and {tokens} new tokens"
            remedy = "Append ones for the new tokens to the earlier mask, or leave it out."
        _refuse("attention_mask", f"of shape {list(mask.shape)}", required, remedy)
    kept = mask.bool()
    if known is None and bool(kept.all()):
        return None
    if bool((kept[:, 1:] >= kept[:, :-1]).all()):
        found = (~kept).sum(1).tolist()
        if [min(rows, past) for rows in found] == (known or [0] * len(found)):
            return found
    elif cache is None and bool((kept[:, 1:] <= kept[:, :-1]).all()):
        return None
    _refuse(
        "attention_mask",
        "padding within or behind a row's tokens" if past == 0 else "other padding than before",
        "padding in front of the tokens; or behind them, without a cache",
        "Pad on the left to generate.",
    )


def _packed(positions: Tensor | None) -> Tensor | None:
    """``cu_seqlens`` of documents packed into one row, each counted from 0; None for others."""
    if positions is None or positions.shape[0] != 1:
        return None
    row = positions[0]
    starts = (row == 0).nonzero()[:, 0]
    if starts.shape[0] < 2 or int(starts[0]) != 0:
        return None
    token = torch.arange(row.shape[0], device=row.device)
    document = torch.searchsorted(starts, token, right=True) - 1
    if not torch.equal(row, (token - starts[document]).to(row.dtype)):
        return None
    return torch.nn.functional.pad(starts, (0, 1), value=row.shape[0]).to(torch.int32)


def _check_positions(given: Tensor | None, expected: Tensor) -> None:
    """Positions count from each row's first token; those of padding are free."""
    if given is None:
        return
    if given.ndim != 2 or given.shape[1] != expected.shape[1]:
        required = f"[B, {expected.shape[1]}]"
        remedy = "Leave position_ids out."
        _refuse("position_ids", f"of shape {list(given.shape)}", required, remedy)
    if not bool(((given == expected) | (expected < 0)).all()):
        _refuse(
            "position_ids",
            "other than consecutive",
            "consecutive from a row's first token on, or from 0 again for documents in one row",
            "Leave position_ids out, and pack documents into a batch of one row without a cache.",
        )


def _check_cache(cache: Any, config: Any) -> None:
    for number, kind in enumerate(config.layer_types):
        layer = cache.layers[number] if number < len(cache.layers) else None
        needed = () if kind == "sliding_attention" else CACHE_LAYER
        # Static layers return all of their memory, rows yet to come included.
        growing = layer is not None and not layer.is_compileable
        if not growing or not all(hasattr(layer, name) for name in needed):
            _refuse(
                "cache",
                f"a {type(cache).__name__} whose layer {number} is {type(layer).__name__}",
                "V4's own cache layers",
                "Pass DynamicCache(config=model.config), or none.",
            )
