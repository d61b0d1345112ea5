"""Every operation that is dispatched, and the class that describes its calls."""

from __future__ import annotations

from .call_spec import CHOICES, CallSpec, check_device_fields, check_spec
from .compressor_call import CompressorSpec
from .indexer_call import IndexerSpec
from .validation import fail

AnySpec = CallSpec | CompressorSpec | IndexerSpec

SPECS: dict[str, type[CallSpec] | type[CompressorSpec] | type[IndexerSpec]] = {
    "attention": CallSpec,
    "compress_kv": CompressorSpec,
    "lightning_indexer": IndexerSpec,
}

_WORDS = {
    **CHOICES,
    "weights_dtype": CHOICES["dtype"],
    "bias_dtype": CHOICES["dtype"],
}


def check_any_spec(spec: AnySpec) -> None:
    """Refuse a hand-made spec that describes no call of its operation.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a field out of its range, or two that contradict each other.
    """
    if isinstance(spec, CallSpec):
        check_spec(spec)
        return
    for field, default in type(spec)._field_defaults.items():
        value = getattr(spec, field)
        if field in _WORDS:
            if value not in _WORDS[field]:
                fail(field, repr(value), f"one of {', '.join(_WORDS[field])}")
        elif type(default) in (int, bool) and type(value) is not type(default):
            fail(field, repr(value), f"of type {type(default).__name__}", error=TypeError)
        elif type(default) is int and value < (least := int(field != "pool")):
            fail(field, value, f"{least} or more")
    check_device_fields(spec)
    if isinstance(spec, CompressorSpec):
        needs = spec.needs_grad
        if not isinstance(needs, tuple) or [type(item) for item in needs] != [bool] * 3:
            fail("needs_grad", repr(needs), "a bool for each of values, gates, position_bias")
    if spec.documents == "doc_ids":
        fail("documents", repr("doc_ids"), f"none or cu_seqlens for {spec.operation}")
    if spec.documents == "cu_seqlens" and spec.batch != 1:
        fail("batch", spec.batch, "1 with cu_seqlens")
