"""CallSpec: a call without its data, the key of every routing decision."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .call import Call, Kind
from .validation import DTYPES, MAX_ROWS, fail
from .wording import quoted

GRADIENT_INPUTS = ("query", "local_kv", "sparse_kv", "attention_sink")


class CallSpec(NamedTuple):
    """Frozen, hashable, picklable description of a call.

    Built from real, meta or fake tensors, or by hand (every field has a default), so that
    routing can be asked about hardware that is not here.

    Attributes:
        kind: window, gather or dense-compressed.
        dtype: the query's dtype name without ``torch.``, e.g. ``"bfloat16"``.
        device_type: ``"cuda"``, ``"cpu"``, ``"meta"``...
        capability: CUDA compute capability as ``major * 10 + minor`` of the tensors' own
            device, None off CUDA.
        batch, heads, kv_heads, tokens, head_dim: B, H, G, T, D.
        pool: S, rows of ``sparse_kv`` (0 for the window kind).
        slots: K, ``kv_indices.shape[-1]`` (0 unless gather).
        window: W, the sliding window size.
        compress_ratio: tokens per pool entry, 0 unless dense-compressed.
        index_dtype: ``"int32"``, ``"int64"`` or ``"none"``.
        sink: dtype name of the attention sink, or ``"none"``.
        documents: ``"none"``, ``"cu_seqlens"`` or ``"doc_ids"``.
        strides: of query and KV: ``"aligned"`` when the last dimension is contiguous and every
            row starts on 16 bytes, ``"unit"`` when it is only contiguous, else ``"any"``.
        needs_grad: which of query, local_kv, sparse_kv, attention_sink need gradients.
        deterministic: torch's deterministic algorithms are on.
        tracing: the call is traced by torch.compile, fake tensors or a dispatch mode.
    """

    kind: Kind = Kind.GATHER
    dtype: str = "bfloat16"
    device_type: str = "cpu"
    capability: int | None = None
    batch: int = 1
    heads: int = 64
    kv_heads: int = 1
    tokens: int = 4096
    head_dim: int = 512
    pool: int = 1024
    slots: int = 512
    window: int = 128
    compress_ratio: int = 0
    index_dtype: str = "int32"
    sink: str = "float32"
    documents: str = "none"
    strides: str = "aligned"
    needs_grad: tuple[bool, bool, bool, bool] = (False, False, False, False)
    deterministic: bool = False
    tracing: bool = False

    operation = "attention"

    @property
    def differentiable(self) -> bool:
        """Whether any input needs a gradient."""
        return any(self.needs_grad)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": tuple(_name(dtype) for dtype in DTYPES),
    "sink": ("none", *(_name(dtype) for dtype in DTYPES)),
    "index_dtype": ("none", "int32", "int64"),
    "documents": ("none", "cu_seqlens", "doc_ids"),
    "strides": ("aligned", "unit", "any"),
}
"""Fields of a CallSpec that take one of a few words."""

CHOICE_REMEDIES = {
    **dict.fromkeys(("dtype", "weights_dtype", "bias_dtype"), "Name it as torch does: bfloat16."),
    "sink": 'Name its dtype, as "float32", or pass "none".',
    "index_dtype": "Leave it out for int32.",
    "documents": "Leave it out when none are packed.",
    "strides": 'Leave it out for tensors as torch.empty() makes them, "aligned".',
}
"""What to do about a field that is none of its words."""

LEAST = {
    **dict.fromkeys(("batch", "heads", "kv_heads", "tokens", "head_dim"), 1),
    **dict.fromkeys(("pool", "slots", "window", "compress_ratio"), 0),
}
"""Fields of a CallSpec that are whole numbers, and the least that each can be."""

MOST = {
    **dict.fromkeys(("batch", "heads", "kv_heads", "head_dim", "slots", "window"), sys.maxsize),
    **dict.fromkeys(("tokens", "pool", "compress_ratio"), MAX_ROWS),
}
"""The most that they can be, as for calls."""

ABSENT: dict[Kind, dict[str, tuple[object, str]]] = {
    Kind.WINDOW: {
        "pool": (0, "Name another kind, or leave it out: there is no pool."),
        "slots": (0, "Name kind gather, or leave it out: nothing is selected."),
        "compress_ratio": (0, "Name kind dense-compressed, or leave it out."),
        "index_dtype": ("none", "Name kind gather, or leave it out: there are no indices."),
    },
    Kind.GATHER: {"compress_ratio": (0, "Name kind dense-compressed, or leave it out.")},
    Kind.DENSE: {
        "slots": (0, "Name kind gather, or leave it out: every complete entry is selected."),
        "index_dtype": ("none", "Name kind gather, or leave it out: there are no indices."),
    },
}
"""Fields that calls of a kind lack: their value then, and advice for another."""


@lru_cache
def is_device_type(name: str) -> bool:
    """Whether torch knows devices of this type; "cuda:0" is none."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def check_device_fields(spec: Any) -> None:
    """Refuse a spec of any operation whose device or modes are of the wrong type.

    Raises:
        TypeError: it names the field.
        ValueError: no device type, or no capability.
    """
    remedy = 'Pass "cuda" or "cpu", say.'
    if not isinstance(spec.device_type, str):
        fail("device_type", quoted(spec.device_type), "a string", remedy, TypeError)
    if not is_device_type(spec.device_type):
        fail("device_type", quoted(spec.device_type), "a device type without an index", remedy)
    capability = spec.capability
    if capability is not None:
        if isinstance(capability, bool) or not isinstance(capability, int):
            remedy = "Pass major * 10 + minor, as 90 for an H100."
            fail("capability", quoted(capability), "an int or None", remedy, TypeError)
        if not 10 <= capability <= 999:
            fail("capability", capability, "major * 10 + minor", "An H100's is 90.")
    for field in ("deterministic", "tracing"):
        value = getattr(spec, field)
        if not isinstance(value, bool):
            fail(field, quoted(value), "a bool", "Pass True or False.", TypeError)


def check_spec(spec: CallSpec) -> CallSpec:
    """A hand-made CallSpec as ``spec_of`` would give it; one of no call is refused.

    Fields that its kind lacks may be left at their defaults; they become 0 or "none". The kind may
    be a Kind's value.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a field out of its range, or two that contradict each other.
    """
    if not isinstance(spec.kind, str) or spec.kind not in list(Kind):
        required = f"one of {', '.join(kind.value for kind in Kind)}"
        fail("kind", quoted(spec.kind), required, "Name one in full, as Kind.DENSE is.")
    for field, allowed in CHOICES.items():
        value = getattr(spec, field)
        if not isinstance(value, str) or value not in allowed:
            fail(field, quoted(value), f"one of {', '.join(allowed)}", CHOICE_REMEDIES[field])
    spec = spec._replace(kind=Kind(spec.kind))
    for field, smallest in {**LEAST, "compress_ratio": int(spec.kind is Kind.DENSE)}.items():
        value = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int):
            fail(field, quoted(value), "an int", f"Pass int({field}).", TypeError)
        if value < smallest:
            default = spec._field_defaults[field]
            remedy = f"Leave it out for {default}." if default >= smallest else "V4 has 128."
            fail(field, value, f"{smallest} or more", remedy)
        if value > MOST[field]:
            fail(field, value, f"at most {MOST[field]}", "No call can have so many.")
    check_device_fields(spec)
    for field, (value, remedy) in ABSENT[spec.kind].items():
        found = getattr(spec, field)
        if found not in (value, spec._field_defaults[field]):
            fail(field, quoted(found), f"{value} for kind {spec.kind.value}", remedy)
    if spec.kind is Kind.GATHER and spec.index_dtype == "none":
        fail("index_dtype", "'none'", "int32 or int64 for kind gather", "Leave it out for int32.")
    needs = spec.needs_grad
    if not isinstance(needs, tuple) or [type(item) for item in needs] != [bool] * 4:
        required = f"a bool for each of {', '.join(GRADIENT_INPUTS)}"
        fail("needs_grad", quoted(needs), required, "Leave it out when none of them does.")
    if spec.sink not in ("none", "float32", spec.dtype):
        required = f"none, float32 or {spec.dtype}, as dtype is"
        fail("sink", quoted(spec.sink), required, "Name float32, which goes with every dtype.")
    if spec.heads % spec.kv_heads:
        required = f"a divisor of the {spec.heads} heads"
        fail("kv_heads", spec.kv_heads, required, "Leave it out for one shared head.")
    if spec.documents == "cu_seqlens" and spec.batch != 1:
        fail("batch", spec.batch, "1 with cu_seqlens", "Pack the batch, or use doc_ids.")
    return spec._replace(**{field: value for field, (value, _) in ABSENT[spec.kind].items()})


@lru_cache(maxsize=64)
def device_capability(device: torch.device) -> int | None:
    """``major * 10 + minor`` of a CUDA device, None for other devices or without a driver."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        major, minor = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError):
        return None  # a fake CUDA tensor on a machine without a GPU
    return major * 10 + minor


def stride_class(*tensors: Tensor | None) -> str:
    """The ``strides`` field of CallSpec for these tensors."""
    found = "aligned"
    for tensor in tensors:
        if tensor is None:
            continue
        shape, size = tensor.shape, tensor.element_size()
        # Meta and fake tensors have no address; their storage offset stands for it.
        abstract = tensor.is_meta or isinstance(tensor, FakeTensor)
        start = int(tensor.storage_offset()) * size if abstract else tensor.data_ptr()
        if not abstract and tensor.is_contiguous() and (count := tensor.numel()):
            apart = shape[-1] * size % 16 != 0 and count != shape[-1]
        else:
            strides = tensor.stride()
            if strides[-1] != 1 and shape[-1] > 1:
                return "any"
            rows = zip(strides[:-1], shape[:-1], strict=True)
            apart = any(count > 1 and stride * size % 16 for stride, count in rows)
        if start % 16 or apart:
            found = "unit"
    return found


def spec_of(
    call: Call, needs_grad: tuple[bool, bool, bool, bool], *, tracing: bool = False
) -> CallSpec:
    """The CallSpec of a validated call, from its metadata alone."""
    query, sparse_kv, kv_indices = call.query, call.sparse_kv, call.kv_indices
    batch, heads, tokens, head_dim = query.shape
    documents = "none"
    if call.cu_seqlens is not None:
        documents = "cu_seqlens"
    elif call.doc_ids is not None:
        documents = "doc_ids"
    sink = call.attention_sink
    return CallSpec(
        kind=call.kind,
        dtype=_name(query.dtype),
        device_type=query.device.type,
        capability=device_capability(query.device),
        batch=batch,
        heads=heads,
        kv_heads=call.local_kv.shape[1],
        tokens=tokens,
        head_dim=head_dim,
        pool=0 if sparse_kv is None else sparse_kv.shape[2],
        slots=0 if kv_indices is None else kv_indices.shape[2],
        window=call.sliding_window_size,
        compress_ratio=call.compress_ratio or 0,
        index_dtype="none" if kv_indices is None else _name(kv_indices.dtype),
        sink="none" if sink is None else _name(sink.dtype),
        documents=documents,
        strides=stride_class(query, call.local_kv, sparse_kv),
        needs_grad=needs_grad,
        deterministic=deterministic_mode(),
        tracing=tracing,
    )


def deterministic_mode() -> bool:
    """Whether torch insists on deterministic algorithms (``warn_only`` does not insist)."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
