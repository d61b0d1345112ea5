"""Every field case that is a matter of numbers, for each dtype."""

from __future__ import annotations

from . import field_documents, field_limits, field_relations, field_values
from .field_case import FieldCase

DTYPES = ("float32", "bfloat16", "float16")


def field_cases(dtypes: tuple[str, ...] = DTYPES) -> list[FieldCase]:
    """The cases in the order of the field list's ids, for each of ``dtypes``."""
    found = [
        case
        for module in (field_values, field_limits, field_relations, field_documents)
        for family in module.FAMILIES
        for dtype in dtypes
        for case in family(dtype)
    ]
    return sorted(found, key=lambda case: case.name[:3])
