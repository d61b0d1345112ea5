"""``attention()`` called with a Call's tensors and scalars."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from csa_dispatch import Call, attention


def attend(call: Call, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """``attention()`` with a Call's tensors and scalars: output and lse."""
    tensors, scalars = arguments_of(call)
    return attention(*tensors, **scalars, return_lse=True, backend=backend)


def arguments_of(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, by position and by name, that make ``attention()`` see this call."""
    tensors = (
        call.query,
        call.local_kv,
        call.sparse_kv,
        call.kv_indices,
        call.attention_sink,
    )
    scalars = {
        "sliding_window_size": call.sliding_window_size,
        "compress_ratio": call.compress_ratio,
        "scale": call.scale,
    }
    return tensors, scalars
