"""Every operation that is dispatched, and the class that describes its calls."""

from __future__ import annotations

from .call_spec import CHOICE_REMEDIES, CHOICES, CallSpec, check_device_fields, check_spec
from .compressor_call import CompressorSpec
from .indexer_call import IndexerSpec
from .validation import fail
from .wording import quoted

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


def check_any_spec(spec: AnySpec) -> AnySpec:
    """A hand-made spec as its operation's calls have it; one of no call is refused.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a field out of its range, or two that contradict each other.
    """
    if isinstance(spec, CallSpec):
        return check_spec(spec)
    for field, default in type(spec)._field_defaults.items():
        value = getattr(spec, field)
        if field in _WORDS:
            if not isinstance(value, str) or value not in _WORDS[field]:
                # Only attention() takes doc_ids; the other operations refuse them below.
                words = [word for word in _WORDS[field] if word != "doc_ids"]
                required = f"one of {', '.join(words)}"
                fail(field, quoted(value), required, CHOICE_REMEDIES[field])
        elif type(default) in (int, bool) and type(value) is not type(default):
            kind = type(default).__name__
            fail(field, quoted(value), f"of type {kind}", f"Pass {kind}({field}).", TypeError)
        elif type(default) is int and value < (least := int(field != "pool")):
            fail(field, value, f"{least} or more", f"Leave it out for {default}.")
    check_device_fields(spec)
    if isinstance(spec, CompressorSpec):
        needs = spec.needs_grad
        if not isinstance(needs, tuple) or [type(item) for item in needs] != [bool] * 3:
            required = "a bool for each of values, gates, position_bias"
            fail("needs_grad", quoted(needs), required, "Leave it out when none of them does.")
    if spec.documents == "doc_ids":
        required = f"none or cu_seqlens for {spec.operation}"
        fail("documents", repr("doc_ids"), required, "Pack them in a batch of 1, cu_seqlens.")
    if spec.documents == "cu_seqlens" and spec.batch != 1:
        fail("batch", spec.batch, "1 with cu_seqlens", "Pack the batch along the tokens.")
    return spec
