"""``attention()`` under a name in transformers' AttentionInterface, for window-only layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NoReturn

from torch import Tensor, nn

from ...functional import attention_with_past
from ...validation import fail
from ...wording import told
from .probing import v4_modeling


def register_attention(name: str = "csa_dispatch") -> str:
    """Register ``attention()`` as ``attn_implementation=name`` for window-only layers.

    For models whose layers hand one tensor over as key and value, with a sliding window, and
    ``s_aux`` or no sinks: DeepSeek-V4's window layers. Layers with a compressor need ``enable``,
    which serves all three kinds.

    Args:
        name: what ``model.set_attn_implementation`` and ``attn_implementation=`` take. Registering
            it again changes nothing.

    Returns:
        ``name``.

    Raises:
        ImportError: transformers is absent, older than 5.24, or lacks a part that we read.
        TypeError: ``name`` is not a string.
        ValueError: ``name`` is empty, or transformers knows another implementation by it.
    """
    if not isinstance(name, str):
        remedy = 'Pass a name such as "csa_dispatch".'
        fail("name", told(name), "a string", remedy, TypeError)
    if not name:
        fail("name", "''", "a name of one character or more", 'Leave it out for "csa_dispatch".')
    v4_modeling()
    transformers = import_module("transformers")
    ours = (
        (transformers.AttentionInterface, window_attention),
        (transformers.AttentionMaskInterface, no_mask),
    )
    for interface, function in ours:
        # The registers are the process's: every model of that implementation would change.
        if interface().get(name, function) is not function:
            actual = f"{name!r}, which transformers' {interface.__name__} has already"
            fail("name", actual, "a name not taken", 'Leave it out for "csa_dispatch".')
    for interface, function in ours:
        interface.register(name, function)
    return name


def no_mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask of a model's layers: none. The window is causal by itself.

    Raises:
        ValueError: the batch is padded, or its mask is more than the causal window or of another
            shape than the batch's cached and new tokens.
    """
    if not kwargs.get("allow_is_causal_skip", True):
        actual = "more than a causal window (packed position_ids, say)"
        _fail("mask", actual, "just that", "Use enable(model), which takes packed documents.")
    if attention_mask is None:
        return
    if "q_length" in kwargs:
        wanted = [kwargs["batch_size"], int(kwargs.get("q_offset", 0)) + kwargs["q_length"]]
        if list(attention_mask.shape) != wanted:
            actual, required = f"of shape {list(attention_mask.shape)}", f"of shape {wanted}"
            _fail("attention_mask", actual, required, "Pass the tokenizer's, or leave it out.")
    if not bool(attention_mask.all()):
        _fail("attention_mask", "padded", "all ones", "Batch prompts of one length.")


def window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: output ``[B, T, H, D]``, and no weights.

    Args:
        query: ``[B, H, T, D]``.
        key, value: one tensor ``[B, G, P + T, D]``: rows kept from before, then the new ones.
        sliding_window: rows of the window, the token's own included.
        s_aux: sinks ``[H]``.

    Raises:
        ValueError: what ``attention()`` cannot be: a mask, dropout, other values than keys, no
            window, or a layer with a compressor.
    """
    if getattr(module, "compressor", None) is not None:
        _fail("module", "a layer with a compressor", "window-only", "Use enable(model).")
    if attention_mask is not None:
        _fail("attention_mask", "given", "None", "The window is causal by itself.")
    if dropout:
        _fail("dropout", dropout, "0", "Set config.attention_dropout = 0.")
    if value is not key:
        _fail("value", "another tensor than key", "key itself", "Keys are their own values here.")
    if sliding_window is None:
        _fail("sliding_window", "None", "an int", "Set config.sliding_window.")
    output = attention_with_past(
        query,
        key,
        attention_sink=s_aux,
        past=key.shape[2] - query.shape[2],
        sliding_window_size=sliding_window,
        scale=scaling,
    )
    return output.transpose(1, 2), None


def _fail(argument: str, actual: object, required: str, remedy: str) -> NoReturn:
    fail(argument, actual, f"{required} for attention() under transformers", remedy)
