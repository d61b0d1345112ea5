"""The calls of frameworks_cuda.py: what a backend under test can be given, and tensors for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda"


class Subject(NamedTuple):
    """Backends under test, and the calls they take.

    Attributes:
        forward: the forced backend.
        backward: the forced backward_backend, None for the same.
        sees: "indices" of the pool, "ratio" (entries by compress_ratio) or "window" (no pool).
        head_dims: those with kernels of their own; calls that name none have the first.
        most_slots: most slots of kv_indices.
        repeatable: False if it refuses deterministic algorithms.
    """

    forward: str
    backward: str | None = None
    sees: str = "indices"
    head_dims: tuple[int, ...] = (64, 512)
    most_slots: int = 64
    repeatable: bool = True

    @property
    def name(self) -> str:
        return self.forward if self.backward is None else f"{self.forward}+{self.backward}"

    def forced(self) -> dict[str, str | None]:
        """Keywords of attention() that force the backends."""
        return {"backend": self.forward, "backward_backend": self.backward}

    def seen(self, pool: Tensor, indices: Tensor | None) -> dict[str, Any]:
        """Keywords of attention() that say what is seen of ``pool``."""
        if self.sees == "window":
            return {}
        if self.sees == "ratio" or indices is None:
            return {"sparse_kv": pool, "compress_ratio": 2}
        return {"sparse_kv": pool, "kv_indices": indices}

    def packed(self, offsets: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Keywords of attention() for ``cu_seqlens`` and ``cu_seqlens_k``, or for neither."""
        names = ("cu_seqlens",) if self.sees == "window" else ("cu_seqlens", "cu_seqlens_k")
        return dict(zip(names, offsets, strict=False))

    def gradients(
        self, output: Tensor, leaves: list[Tensor], *, retain_graph: bool = False
    ) -> list[Tensor]:
        """Of query, local_kv, the pool (zeros if no call sees one) and the sink."""
        return list(
            torch.autograd.grad(
                output,
                leaves,
                upstream(output),
                retain_graph=retain_graph,
                materialize_grads=self.sees == "window",
            )
        )

    def tensors(
        self,
        *,
        heads: int = 16,
        tokens: int = 33,
        pool: int = 40,
        slots: int = 20,
        head_dim: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 27,
    ) -> list[Tensor]:
        """Query, local_kv, sparse_kv, sink (leaves) and kv_indices."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        head_dim = head_dim or self.head_dims[0]
        shape = (batch, tokens, min(slots, self.most_slots))
        made = [
            torch.randn(sizes, generator=generator, device=DEVICE).to(dtype).requires_grad_()
            for sizes in (
                (batch, heads, tokens, head_dim),
                (batch, 1, tokens, head_dim),
                (batch, 1, pool, head_dim),
            )
        ]
        sink = torch.randn(heads, generator=generator, device=DEVICE).requires_grad_()
        indices = torch.randint(-2, pool, shape, generator=generator, device=DEVICE)
        return [*made, sink, indices.to(torch.int32)]


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("triton"),
        Subject("eager"),
        Subject("flex", sees="ratio"),
        Subject("triton", "cudnn", head_dims=(512,), repeatable=False),
        Subject("attention_gym", sees="window"),
        Subject("attention_gym", "triton", most_slots=8),
    )
}
"""Attention Gym's backward of a pool needs a Triton newer than 3.6, its forward unrolls slots."""

V4 = {"heads": 64, "head_dim": 512, "tokens": 96, "pool": 64, "slots": 64}
"""V4's heads, so that kernels made for them run; few tokens."""


def offsets_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def upstream(output: Tensor) -> Tensor:
    """A gradient for ``output`` that is the same in every row."""
    weights = torch.linspace(-1, 1, output.shape[-1], device=DEVICE).to(output.dtype)
    return weights.expand(output.shape).contiguous()
