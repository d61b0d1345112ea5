"""Cases: attention calls described without their data, and the data made from the description.

A case is built the same on every device from its seed. Its ``content`` says how nasty the data
is; whatever it is, the right answer is the oracle's.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.call import Call, Kind
from csa_dispatch.call_spec import GRADIENT_INPUTS, CallSpec, stride_class
from csa_dispatch.validation import fail

from .documents import draw_doc_ids, draw_indices, draw_offsets, split_pool
from .memory import place
from .oracle import VisibleRows, visible_rows

CONTENTS = ("random", "scattered", "duplicates", "poisoned", "messy", "nan")
"""What the data holds.

random: distinct valid slots. scattered: -1 and out-of-range filler between valid slots, and rows
without any. duplicates: repeated slots. poisoned: NaN, Inf and huge numbers in all that nobody may
read, KV rows and upstream gradients of rows without keys alike. messy: all of these, and sinks of
-inf and +inf. nan: NaN in one visible row of each KV tensor, which must reach what sees it and no
more.
"""

MEMORY = ("contiguous", "transposed", "padded", "expanded", "strided")
"""How tensors lie in memory; ``memory.place`` says what each means."""


@dataclass(frozen=True)
class Case:
    """One attention call without its data; fields of a CallSpec's name mean the same.

    Fields that the kind has no use for are cleared, and a packed case has one batch entry, so
    every combination of fields is a valid call.

    Attributes:
        sink: its dtype's name, ``"same"`` for the query's, or ``"none"``.
        memory: one of ``MEMORY``.
        needs_grad: query, local_kv, sparse_kv, attention_sink.
        content: one of ``CONTENTS``.
        scale: None for the default, ``head_dim ** -0.5``.
        seed: of everything drawn.
    """

    kind: Kind = Kind.GATHER
    dtype: str = "float32"
    batch: int = 1
    heads: int = 4
    kv_heads: int = 1
    tokens: int = 33
    head_dim: int = 64
    pool: int = 20
    slots: int = 9
    window: int = 5
    compress_ratio: int = 4
    index_dtype: str = "int32"
    sink: str = "float32"
    documents: str = "none"
    memory: str = "contiguous"
    needs_grad: tuple[bool, bool, bool, bool] = (True, True, True, True)
    deterministic: bool = False
    content: str = "messy"
    scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.kv_heads, self.tokens, self.head_dim) < 1:
            sizes = "batch, heads, kv_heads, tokens and head_dim"
            raise ValueError(f"{sizes} must be positive. Leave one out for its default.")
        if self.heads % self.kv_heads:
            required = f"a divisor of heads, {self.heads}"
            fail("kv_heads", self.kv_heads, required, "Leave it out for one shared head.")
        for name, value, words in (
            ("content", self.content, CONTENTS),
            ("memory", self.memory, MEMORY),
        ):
            if value not in words:
                default = type(self).__dataclass_fields__[name].default
                remedy = f"Leave it out for {default}."
                fail(name, repr(value), f"one of {', '.join(words)}", remedy)
        kind = Kind(self.kind)
        query, local, pool, sink = self.needs_grad
        pool, sink = pool and kind is not Kind.WINDOW, sink and self.sink != "none"
        cleared: dict[str, object] = {"kind": kind, "needs_grad": (query, local, pool, sink)}
        if kind is Kind.WINDOW:
            cleared["pool"] = 0
        if kind is not Kind.GATHER:
            cleared |= {"slots": 0, "index_dtype": "none"}
        elif self.index_dtype == "none":
            cleared["index_dtype"] = "int32"
        if kind is not Kind.DENSE:
            cleared["compress_ratio"] = 0
        if self.documents == "cu_seqlens":
            cleared["batch"] = 1
        for name, value in cleared.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """A unique readable name."""
        sizes = (
            f"B{self.batch}H{self.heads}G{self.kv_heads}T{self.tokens}S{self.pool}K{self.slots}"
            f"D{self.head_dim}W{self.window}r{self.compress_ratio}"
        )
        grads = "".join(
            letter for letter, wanted in zip("qlps", self.needs_grad, strict=True) if wanted
        )
        parts = [
            self.kind.value,
            self.dtype,
            sizes,
            f"docs={self.documents}",
            f"sink={self.sink}",
            f"idx={self.index_dtype}",
            self.memory,
            f"grad={grads or 'none'}",
            self.content,
            f"seed={self.seed}",
        ]
        if self.scale is not None:
            parts.append(f"scale={self.scale:g}")
        if self.deterministic:
            parts.append("deterministic")
        return "-".join(parts)

    @property
    def differentiable(self) -> bool:
        return any(self.needs_grad)

    def spec(self, device_type: str = "cpu", capability: int | None = None) -> CallSpec:
        """The CallSpec of this case on a device of that type and CUDA capability."""
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in CallSpec._fields
        }
        shared["strides"] = stride_class(*self._placed())
        shared["sink"] = self.dtype if self.sink == "same" else self.sink
        return CallSpec(**shared, device_type=device_type, capability=capability)

    def _placed(self) -> list[Tensor]:
        """Query and KV without data, laid out as ``build`` does it."""
        dtype = getattr(torch, self.dtype)
        sizes = {
            "query": (self.heads, self.tokens),
            "local_kv": (self.kv_heads, self.tokens),
            "sparse_kv": (self.kv_heads, self.pool),
        }
        if self.kind is Kind.WINDOW:
            del sizes["sparse_kv"]
        return [
            place(
                torch.empty(self.batch, *size, self.head_dim, dtype=dtype, device="meta"),
                self.memory,
                name,
            )
            for name, size in sizes.items()
        ]


class Inputs(NamedTuple):
    """A case's data: the arguments of ``attention()`` in BHSD layout, and an upstream gradient.

    Attributes:
        scale: None for the default.
        grad_output: ``[B, H, T, D]`` in the query's dtype.

    The others are ``Call``'s.
    """

    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor | None
    kv_indices: Tensor | None
    attention_sink: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    doc_ids: Tensor | None
    sliding_window_size: int
    compress_ratio: int | None
    scale: float | None
    grad_output: Tensor

    @property
    def needs_grad(self) -> tuple[bool, bool, bool, bool]:
        """Which of query, local_kv, sparse_kv, attention_sink require gradients."""
        tensors = (getattr(self, name) for name in GRADIENT_INPUTS)
        query, local, pool, sink = (t is not None and t.requires_grad for t in tensors)
        return query, local, pool, sink


def to_call(inputs: Inputs) -> Call:
    """The backend's view of ``inputs``: detached, scale resolved."""

    def plain(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach()

    scale = inputs.query.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
    return Call(
        inputs.query.detach(),
        inputs.local_kv.detach(),
        plain(inputs.sparse_kv),
        inputs.kv_indices,
        plain(inputs.attention_sink),
        inputs.cu_seqlens,
        inputs.cu_seqlens_k,
        inputs.doc_ids,
        inputs.sliding_window_size,
        inputs.compress_ratio,
        scale,
    )


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Draw the data of ``case`` on the CPU from its seed and lay it out on ``device``."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    messy = case.content == "messy"

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, tokens, head_dim = case.batch, case.tokens, case.head_dim
    query = draw(batch, case.heads, tokens, head_dim)
    local_kv = draw(batch, case.kv_heads, tokens, head_dim)
    sparse_kv = None
    if case.kind is not Kind.WINDOW:
        sparse_kv = draw(batch, case.kv_heads, case.pool, head_dim)
    grad_output = draw(batch, case.heads, tokens, head_dim)
    offsets = pool_offsets = doc_ids = kv_indices = None
    if case.documents == "cu_seqlens":
        offsets = draw_offsets(tokens, spare=tokens // 8 if messy else 0, generator=generator)
        if sparse_kv is not None:
            pool_offsets = split_pool(offsets, case.pool, case.compress_ratio, generator)
    elif case.documents == "doc_ids":
        aligned = 1 if messy else max(1, case.compress_ratio)
        doc_ids = draw_doc_ids(batch, tokens, aligned, generator)
    if case.kind is Kind.GATHER:
        kv_indices = draw_indices(
            (batch, tokens, case.slots), case.pool, offsets, pool_offsets, case.content, generator
        ).to(getattr(torch, case.index_dtype))
    inputs = Inputs(
        query,
        local_kv,
        sparse_kv,
        kv_indices,
        _draw_sink(case, generator),
        offsets,
        pool_offsets,
        doc_ids,
        case.window,
        case.compress_ratio or None,
        case.scale,
        grad_output,
    )
    rows = visible_rows(to_call(inputs))
    if case.content in ("poisoned", "messy"):
        _poison_unseen(inputs, rows, shared=case.memory == "expanded")
    elif case.content == "nan":
        _poison_seen(inputs, rows)
    return _finish(case, inputs, torch.device(device))


def _draw_sink(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.sink == "none":
        return None
    sink = torch.randn(case.heads, generator=generator)
    if case.content == "messy" and case.heads >= 3:
        sink[0], sink[-1] = -math.inf, math.inf
    return sink.to(getattr(torch, case.spec().sink))


def _poison_unseen(inputs: Inputs, rows: list[list[VisibleRows]], *, shared: bool) -> None:
    """NaN, Inf and the largest numbers in the KV rows nobody sees; NaN in rows that see nothing.

    ``shared`` says that batch entries will share memory: then rows must be unseen in all.
    """
    seen_local = {(b, j) for b, tokens in enumerate(rows) for row in tokens for j in row.local}
    seen_pool = {(b, j) for b, tokens in enumerate(rows) for row in tokens for j in row.pool}
    for kv, seen in ((inputs.local_kv, seen_local), (inputs.sparse_kv, seen_pool)):
        if kv is None:
            continue
        largest = torch.finfo(kv.dtype).max
        if shared:
            seen = {(b, j) for b in range(kv.shape[0]) for _, j in seen}
        for b in range(kv.shape[0]):
            for j in range(kv.shape[2]):
                if (b, j) not in seen:
                    kv[b, :, j] = (math.nan, largest, math.inf, -largest, -math.inf)[j % 5]
    for b, tokens in enumerate(rows):
        for t, row in enumerate(tokens):
            if not row.local and not row.pool:
                inputs.query[b, :, t] = math.nan
                inputs.grad_output[b, :, t] = math.nan


def _poison_seen(inputs: Inputs, rows: list[list[VisibleRows]]) -> None:
    """One NaN element in the middlemost seen row of each KV tensor of the first batch entry."""
    if not rows:
        return
    local = sorted({j for row in rows[0] for j in row.local})
    pool = sorted({j for row in rows[0] for j in row.pool})
    if local:
        inputs.local_kv[0, :, local[len(local) // 2], 0] = math.nan
    if pool and inputs.sparse_kv is not None:
        inputs.sparse_kv[0, :, pool[len(pool) // 2], -1] = math.nan


def _finish(case: Case, inputs: Inputs, device: torch.device) -> Inputs:
    """Lay the tensors out as ``case.memory`` says, on ``device``, and mark the leaves."""
    moved = {
        name: place(tensor.to(device), case.memory, name)
        for name, tensor in inputs._asdict().items()
        if isinstance(tensor, Tensor)
    }
    for name, wanted in zip(GRADIENT_INPUTS, case.needs_grad, strict=True):
        if wanted:
            moved[name].requires_grad_()
    return inputs._replace(**moved)
