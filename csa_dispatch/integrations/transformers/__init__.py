"""Hugging Face DeepSeek-V4 models, run through ``attention()``. Needs transformers 5.24 or newer.

``enable(model)`` changes how a model's attention layers compute and nothing else: weights, cache,
``generate()``, ``save_pretrained`` and training stay as they are.
"""

from .interface import register_attention
from .switch import disable, enable

__all__ = ["disable", "enable", "register_attention"]
