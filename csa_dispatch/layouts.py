"""Layouts: the caller's dimension order as views of the canonical BHSD order, never copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

View = Callable[[Tensor], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _swap(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _bshd_kv(kv: Tensor) -> Tensor:
    return kv.transpose(1, 2) if kv.ndim == 4 else kv.unsqueeze(1)


def _sbhd(query: Tensor) -> Tensor:
    return query.permute(1, 2, 0, 3)


def _sbhd_back(output: Tensor) -> Tensor:
    return output.permute(2, 0, 1, 3)


def _sbhd_kv(kv: Tensor) -> Tensor:
    return kv.permute(1, 2, 0, 3) if kv.ndim == 4 else kv.transpose(0, 1).unsqueeze(1)


def _thd(query: Tensor) -> Tensor:
    return query.transpose(0, 1).unsqueeze(0)


def _thd_back(output: Tensor) -> Tensor:
    return output.squeeze(0).transpose(0, 1)


def _thd_kv(kv: Tensor) -> Tensor:
    return kv.transpose(0, 1).unsqueeze(0) if kv.ndim == 3 else kv.unsqueeze(0).unsqueeze(0)


def _batch(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _unbatch(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0)


class Layout(NamedTuple):
    """How one layout's tensors map to and from the canonical ones.

    Attributes:
        query_dims, kv_dims: dimension letters of the query and of KV with a head dimension.
        shared_kv_dims: letters of KV without one (a single shared head), or None when this
            layout always has it.
        token_dims: letters of a per-token tensor (kv_indices has K appended).
        to_query, to_kv, to_tokens: views into canonical order.
        from_output, from_lse: views of canonical results back into the caller's order.
    """

    query_dims: str
    kv_dims: str
    shared_kv_dims: str | None
    token_dims: str
    to_query: View
    to_kv: View
    to_tokens: View
    from_output: View
    from_lse: View


LAYOUTS: dict[str, Layout] = {
    "BHSD": Layout("BHTD", "BGSD", None, "BT", _same, _same, _same, _same, _same),
    "BSHD": Layout("BTHD", "BSGD", "BSD", "BT", _swap, _bshd_kv, _same, _swap, _same),
    "SBHD": Layout("TBHD", "SBGD", "SBD", "BT", _sbhd, _sbhd_kv, _same, _sbhd_back, _same),
    "THD": Layout("THD", "SGD", "SD", "T", _thd, _thd_kv, _batch, _thd_back, _unbatch),
}
