"""``enable`` and ``disable``: forwards replaced on a model's own modules, nothing global."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ...validation import fail
from ...wording import a_kind
from .layers import attention_forward
from .model import model_forward
from .probing import check_layer, v4_modeling

Model = TypeVar("Model", bound=nn.Module)


def enable(model: Model) -> Model:
    """Run the attention of a Hugging Face DeepSeek-V4 model through ``attention()``.

    Outputs, gradients and ``generate()`` are what they were, within rounding. No ``[T, T]`` mask
    is built, the indexer's picks stay indices and its scores are formed some tokens at a time, so
    memory grows linearly with the tokens. Which backend runs follows ``attention()``: policy,
    ``use_backend`` and environment.

    Rows padded on the left are computed one by one, as if alone, and so are documents that
    ``position_ids`` mark in one row; transformers lets padding and other documents into the
    compressed entries. Refused at the call, with a Reason: other masks and positions, caches
    other than ``DynamicCache(config=...)``, ``output_attentions``. Attention dropout in training
    is a ValueError there.

    Args:
        model: a ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model``, or a module that holds one or
            holds its attention layers. Enabling it again changes nothing.

    Returns:
        The same model.

    Raises:
        ImportError: transformers is absent, older than 5.24, or lacks a part that we read.
        TypeError: ``model`` is not a module.
        ValueError: there is no DeepSeek-V4 attention layer in the model.
    """
    _check_module(model)
    modeling = v4_modeling()
    layers = [part for part in model.modules() if isinstance(part, modeling.DeepseekV4Attention)]
    if not layers:
        layer = modeling.DeepseekV4Attention.__name__
        required = f"a transformers DeepSeek-V4 model (with {layer} layers)"
        remedy = "Pass it as from_pretrained() or from_config() makes it."
        fail("model", a_kind(model), required, remedy)
    for layer in layers:
        check_layer(layer)
    for layer in layers:
        _replace(layer, attention_forward)
    for part in model.modules():
        if isinstance(part, modeling.DeepseekV4Model):
            _replace(part, model_forward)
    return model


def disable(model: Model) -> Model:
    """Undo ``enable``; a model that is not enabled is left as it is.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_module(model)
    for part in model.modules():
        _restore(part, attention_forward)
        _restore(part, model_forward)
    return model


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        actual = a_kind(model)
        remedy = "Pass the loaded model itself, from_pretrained(...)'s result say."
        fail("model", actual, "a torch.nn.Module", remedy, TypeError)


def _slot(part: nn.Module) -> str:
    """Where a module's own forward lives: accelerate's hooks wrap it and keep it aside."""
    return "_old_forward" if "_old_forward" in part.__dict__ else "forward"


def _replace(part: nn.Module, forward: Callable[..., Any]) -> None:
    # A bound method would be pickled by its name, which the module's class lacks.
    part.__dict__[_slot(part)] = partial(forward, part)


def _restore(part: nn.Module, forward: Callable[..., Any]) -> None:
    slot = _slot(part)
    if getattr(part.__dict__.get(slot), "func", None) is not forward:
        return
    if slot == "forward":
        del part.__dict__[slot]
    else:
        part.__dict__[slot] = type(part).forward.__get__(part)
