"""Hidden states as rows of tokens, whatever their layout, and where the documents lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..validation import fail
from ..wording import a_kind, quoted


class Rows(NamedTuple):
    """How ``[N, C]`` rows of tokens lie in ``[B, T, C]``.

    Attributes:
        batch, tokens: B and T.
        sequence_first: rows run over ``[T, B]`` (SBHD) rather than ``[B, T]`` (BSHD).
    """

    batch: int
    tokens: int
    sequence_first: bool

    def split(self, rows: Tensor) -> Tensor:
        """``[N, ...] -> [B, T, ...]``, a view."""
        if self.sequence_first:
            return rows.unflatten(0, (self.tokens, self.batch)).transpose(0, 1)
        return rows.unflatten(0, (self.batch, self.tokens))

    def join(self, tensor: Tensor) -> Tensor:
        """``[B, T, ...] -> [N, ...]``."""
        return (tensor.transpose(0, 1) if self.sequence_first else tensor).flatten(0, 1)


class Tokens(NamedTuple):
    """The tokens of one call of a layer.

    Attributes:
        hidden: ``[N, hidden_size]``.
        residual: ``[N, q_lora_rank]``, the normalised low-rank query.
        rows: how the N rows lie in ``[B, T]``.
        positions: each token's position in its document, ``[T]``.
        frequencies: the layer's, of ``rope_frequencies``.
    """

    hidden: Tensor
    residual: Tensor
    rows: Rows
    positions: Tensor
    frequencies: Tensor

    def detached(self) -> Tokens:
        return self._replace(hidden=self.hidden.detach(), residual=self.residual.detach())


def rows_of(hidden_states: Tensor, layout: str) -> tuple[Tensor, Rows]:
    """Rows ``[N, C]`` of ``[B, T, C]`` (BSHD) or ``[T, B, C]`` (SBHD), and how they lie."""
    if layout not in ("BSHD", "SBHD"):
        fail(
            "layout", quoted(layout), "'BSHD' or 'SBHD'", "Transpose hidden_states to one of them."
        )
    if not isinstance(hidden_states, Tensor):
        fail(
            "hidden_states",
            a_kind(hidden_states),
            "a torch.Tensor",
            "Convert it first.",
            TypeError,
        )
    if hidden_states.ndim != 3:
        actual = f"of shape {list(hidden_states.shape)}"
        required = "of three dimensions, batch, tokens and channels in the layout's order"
        batch = 0 if layout == "BSHD" else 1
        remedy = f"Add a batch of 1 with hidden_states.unsqueeze({batch})."
        if hidden_states.ndim > 3:
            remedy = "Drop or merge dimensions, with squeeze or flatten."
        elif hidden_states.ndim < 2:
            remedy = "Reshape it to a batch, tokens and channels."
        fail("hidden_states", actual, required, remedy)
    first, second, _ = hidden_states.shape
    sizes = (second, first, True) if layout == "SBHD" else (first, second, False)
    return hidden_states.flatten(0, 1), Rows(*sizes)


def token_positions(tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Each token's position in its document, ``[T]``."""
    token = torch.arange(tokens, device=device)
    return token if cu_seqlens is None else token - _start(cu_seqlens, token)


def entry_positions(
    entries: int, compress_ratio: int, cu_seqlens_k: Tensor | None, device: torch.device
) -> Tensor:
    """Position of each entry's first token in its document, ``[S]``."""
    entry = torch.arange(entries, device=device)
    if cu_seqlens_k is not None:
        entry = entry - _start(cu_seqlens_k, entry)
    return entry * compress_ratio


def _start(offsets: Tensor, row: Tensor) -> Tensor:
    """Offset of the document of each row; the last one's for rows behind all documents."""
    document = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    return offsets[document.clamp(max=offsets.shape[0] - 2)]
