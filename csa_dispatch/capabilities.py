"""Capabilities: a backend's one declarative statement of what it supports.

The statement has four uses: the run-time check (``reasons``), the support matrix in the docs
(``describe``), the generated parity cases (``inside``) and the boundary cases just outside each
claim, which must be refused (``outside``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from .reasons import Reason
from .spec import Spec
from .validation import fail
from .wording import quoted


@runtime_checkable
class Allowed(Protocol):
    """The set of values a backend supports for one field of a call's spec."""

    def __contains__(self, value: object) -> bool: ...

    def describe(self) -> str:
        """The set in words, for Reasons and the support table."""
        ...

    def inside(self) -> tuple[object, ...]:
        """Values worth testing that are supported; empty when the set does not bound them."""
        ...

    def outside(self) -> tuple[object, ...]:
        """Values just outside the set, which must be refused."""
        ...


@dataclass(frozen=True)
class OneOf:
    """A finite set of values; ``others`` are known values outside it.

    Raises:
        TypeError: values that are no tuple.
    """

    values: tuple[object, ...]
    others: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("values", self.values), ("others", self.others)):
            if not isinstance(value, tuple):
                remedy = "Write (value,) for one."
                fail(f"OneOf's {name}", repr(value), "a tuple", remedy, TypeError)

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def describe(self) -> str:
        return " or ".join(str(getattr(value, "value", value)) for value in self.values)

    def inside(self) -> tuple[object, ...]:
        return self.values

    def outside(self) -> tuple[object, ...]:
        return self.others


@dataclass(frozen=True)
class Between:
    """Whole numbers from ``low`` to ``high``, both included, that ``multiple_of`` divides.

    Raises:
        TypeError: a bound that is no int.
        ValueError: bounds that no number meets.
    """

    low: int = 0
    high: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("low", self.low),
            ("high", self.high),
            ("multiple_of", self.multiple_of),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                if name == "high" and value is None:
                    continue
                wanted = "an int or None" if name == "high" else "an int"
                fail(f"Between's {name}", quoted(value), wanted, "Pass whole numbers.", TypeError)
        if self.multiple_of < 1:
            fail("Between's multiple_of", self.multiple_of, "1 or more", "Leave it out for any.")
        if self.high is None:
            return
        if self.high < self.low:
            fail("Between's high", self.high, f"at least low, {self.low}", "Swap or mend the two.")
        if self.high // self.multiple_of * self.multiple_of < self.low:
            span = f"{self.low} to {self.high}"
            required = f"a span that holds a multiple of {self.multiple_of}"
            fail("Between", span, required, "Widen the bounds.")

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and value >= self.low
            and (self.high is None or value <= self.high)
            and value % self.multiple_of == 0
        )

    def describe(self) -> str:
        span = f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"
        return span if self.multiple_of == 1 else f"{span}, a multiple of {self.multiple_of}"

    def inside(self) -> tuple[object, ...]:
        first = -(-self.low // self.multiple_of) * self.multiple_of
        values = [first, first + self.multiple_of]
        if self.high is not None:
            values.append(self.high // self.multiple_of * self.multiple_of)
        return tuple(sorted({value for value in values if value in self}))

    def outside(self) -> tuple[object, ...]:
        values = [self.low - 1] if self.low > 0 else []
        if self.high is not None:
            values.append(self.high + 1)
        if self.multiple_of > 1:
            values.append(self.low + self.multiple_of - 1)
        return tuple(value for value in values if value >= 0 and value not in self)


@dataclass(frozen=True)
class AnyValue:
    """No bound."""

    def __contains__(self, value: object) -> bool:
        return True

    def describe(self) -> str:
        return "any"

    def inside(self) -> tuple[object, ...]:
        return ()

    def outside(self) -> tuple[object, ...]:
        return ()


ANY = AnyValue()
FALSE = OneOf((False,), others=(True,))

Predicate = Callable[[Any], Reason | None]
"""A constraint no table can state: returns a Reason, or None when the call's spec fits."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What one direction (forward or backward) of one operation of a backend supports.

    A subclass has a field for each field of the operation's spec that can be bounded.
    ``remedies`` maps a field to advice shown in its Reason. ``predicates`` are small named
    functions for constraints that combine fields; each has a docstring that states the
    constraint, used in the support table.
    """

    predicates: tuple[Predicate, ...] = ()
    remedies: tuple[tuple[str, str], ...] = ()

    def bounds(self) -> dict[str, Allowed]:
        """The fields this statement bounds, in the order of the class."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("predicates", "remedies")
            and not isinstance(getattr(self, field.name), AnyValue)
        }

    def reasons(self, spec: Spec) -> tuple[Reason, ...]:
        """Every constraint ``spec`` does not meet; empty when it is supported."""
        remedies = dict(self.remedies)
        found: list[Reason] = []
        for name, allowed in self.bounds().items():
            value = getattr(spec, name)
            if value not in allowed:
                actual = str(getattr(value, "value", value))
                found.append(Reason(name, actual, allowed.describe(), remedies.get(name, "")))
        for predicate in self.predicates:
            reason = predicate(spec)
            if reason is not None:
                found.append(reason)
        return tuple(found)


@dataclass(frozen=True)
class Capabilities(Claims):
    """Claims about ``attention()``: each field bounds the CallSpec field of the same name."""

    kind: Allowed = ANY
    dtype: Allowed = ANY
    device_type: Allowed = ANY
    capability: Allowed = ANY
    batch: Allowed = ANY
    heads: Allowed = ANY
    kv_heads: Allowed = ANY
    tokens: Allowed = ANY
    head_dim: Allowed = ANY
    pool: Allowed = ANY
    slots: Allowed = ANY
    window: Allowed = ANY
    compress_ratio: Allowed = ANY
    index_dtype: Allowed = ANY
    sink: Allowed = ANY
    documents: Allowed = ANY
    strides: Allowed = ANY
    deterministic: Allowed = ANY
    tracing: Allowed = ANY
