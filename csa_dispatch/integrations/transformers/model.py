"""The forward of transformers' V4 model without its dense mask, and what it must refuse."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...reasons import BackendRefused, Reason

CACHE_LAYER = ("store_compression_weights", "update_compressor_states")


def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepseekV4Model.forward`` with its attention layers enabled.

    Raises:
        BackendRefused: padding before tokens, masks, positions or caches that the layers cannot
            honour; the Reason says what to do.
    """
    forward = type(self).forward
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    kwargs.update(zip(names, args, strict=False))
    inputs = _first(kwargs, "input_ids", "inputs_embeds")
    cache = _first(kwargs, "cache", "past_key_values")
    if inputs is not None:
        past = 0 if cache is None else cache.get_seq_length()
        _check_mask(kwargs.get("attention_mask"), cache)
        _check_positions(kwargs.get("position_ids"), past, inputs.shape[1])
    if cache is not None:
        _check_cache(cache, self.config)
    if kwargs.get("output_attentions", self.config.output_attentions):
        _refuse(
            "output_attentions",
            "True",
            "False",
            "No attention weights are formed; disable() first.",
        )
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


def _check_mask(mask: Any, cache: Any) -> None:
    """Only padding behind all tokens, and that only where no later call would see it."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        _refuse(
            "attention_mask",
            f"a {type(mask).__name__}"
            + (f" of {mask.ndim} dims" if hasattr(mask, "ndim") else ""),
            "a padding mask [B, T], or None",
            "The layers are causal by themselves; leave attention_mask out.",
        )
    kept = mask.bool()
    if bool(kept.all()):
        return
    if not bool(kept[:, :1].all() & (kept[:, 1:] <= kept[:, :-1]).all()):
        _refuse(
            "attention_mask",
            "0 before tokens (left padding)",
            "padding behind all tokens of a row",
            "transformers pools padding into the compressed entries of the row's tokens. "
            "Generate for prompts of one length at a time; pad on the right in training.",
        )
    if cache is not None:
        _refuse(
            "attention_mask",
            "padding with a cache",
            "none with a cache",
            "Later tokens would see the padding. Pass use_cache=False, or prompts of one length.",
        )


def _check_positions(positions: Tensor | None, past: int, tokens: int) -> None:
    if positions is None:
        return
    expected = torch.arange(past, past + tokens, device=positions.device)
    if not torch.equal(positions, expected.to(positions.dtype).expand_as(positions)):
        _refuse(
            "position_ids",
            "other than consecutive",
            f"{past} to {past + tokens - 1} in every row",
            "transformers pools across documents packed by position_ids. Leave position_ids out, "
            "and give documents rows of their own.",
        )


def _check_cache(cache: Any, config: Any) -> None:
    for number, kind in enumerate(config.layer_types):
        if kind == "sliding_attention":
            continue
        layer = cache.layers[number] if number < len(cache.layers) else None
        if not all(hasattr(layer, name) for name in CACHE_LAYER):
            _refuse(
                "cache",
                f"a {type(cache).__name__} whose layer {number} is {type(layer).__name__}",
                "V4's own cache layers",
                "Pass DynamicCache(config=model.config), or none.",
            )
