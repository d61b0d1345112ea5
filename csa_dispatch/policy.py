"""Policies: ordered TOML rules that give the preference order of backends for a call.

A policy file::

    name = "my cluster"

    [[rule]]
    why = "measured on our H200s"
    when = { device_type = "cuda", capability = { min = 90, max = 90 }, dtype = "bfloat16" }
    prefer = ["triton", "triton+cudnn", "eager"]

    [[rule]]
    prefer = ["eager"]

The first rule whose ``when`` matches decides. Keys of ``when`` are CallSpec fields but
needs_grad; a value is one value, a list of values, or ``{ min, max, multiple_of }``. An entry
``"a+b"`` runs forward on a and backward on b.

A rule is about ``attention()`` unless its ``operation`` names another operation; then the keys of
``when`` are fields of that operation's spec. A policy without any rule about an operation leaves
it to the shipped policy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from .call import Kind
from .call_spec import CHOICES, LEAST
from .capabilities import Allowed, Between, OneOf
from .config_files import parse_toml
from .operations import SPECS
from .spec import Spec
from .validation import fail

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


class Entry(NamedTuple):
    """One preference: which backend runs the forward and which the backward."""

    forward: str
    backward: str

    def __str__(self) -> str:
        return self.forward if self.forward == self.backward else "+".join(self)


class Rule(NamedTuple):
    """Preference order for the calls of one operation that ``when`` matches."""

    when: tuple[tuple[str, Allowed], ...]
    prefer: tuple[Entry, ...]
    why: str
    operation: str = "attention"

    def matches(self, spec: Spec) -> bool:
        return self.operation == spec.operation and all(
            getattr(spec, field) in allowed for field, allowed in self.when
        )


class Policy(NamedTuple):
    """Ordered rules; hashable, so that decisions are cached by it."""

    name: str
    rules: tuple[Rule, ...]

    def rule_for(self, spec: Spec) -> tuple[int, Rule]:
        """The first matching rule and its position.

        Raises:
            ValueError: no rule matches.
        """
        for position, rule in enumerate(self.rules):
            if rule.matches(spec):
                return position, rule
        raise ValueError(
            f"policy {self.name!r} has no rule that matches this call of {spec.operation} "
            f"({spec.dtype} on {spec.device_type}); end it with one without when."
        )


def _operation(where: str, name: object) -> str:
    if not isinstance(name, str) or name not in SPECS:
        required = f"one of {', '.join(SPECS)}"
        fail(f"{where}: operation", repr(name), required, "Leave it out for attention.")
    return name


def _allowed(where: str, operation: str, field: str, value: object) -> Allowed:
    spec = SPECS[operation]
    if field not in spec._fields:
        required = f"one of {', '.join(spec._fields)}"
        remedy = "Name the rule's operation if the field is another's."
        fail(f"{where}: when.{field}", f"not a field of {spec.__name__}", required, remedy)
    if field == "needs_grad":
        remedy = 'Leave it out: an entry "a+b" is passed over when its backward cannot run.'
        fail(f"{where}: when.{field}", repr(value), "no key of when", remedy)
    if isinstance(value, Mapping):
        if _type_of(spec, field) is not int:
            remedy = "Write one value, or a list of them."
            fail(f"{where}: when.{field}", "a span", "of a field that is a number", remedy)
        unknown = set(value) - {"min", "max", "multiple_of"}
        if unknown:
            known = "min, max, multiple_of"
            raise ValueError(
                f"{where}: when.{field} has unknown keys {sorted(unknown)}; known: {known}. "
                "Leave out the others."
            )
        for key, bound in value.items():
            if isinstance(bound, bool) or not isinstance(bound, int):
                remedy = "Leave it out for no bound."
                fail(f"{where}: when.{field}.{key}", repr(bound), "an int", remedy)
        least = LEAST.get(field, 0)
        _check_span(f"{where}: when.{field}", value, least)
        low, step = value.get("min", least), value.get("multiple_of", 1)
        return Between(low, value.get("max"), step)
    values = value if isinstance(value, list) else [value]
    if not values:
        fail(
            f"{where}: when.{field}", "[]", "a list of one value or more", "Leave it out for any."
        )
    if field == "kind":
        try:
            return OneOf(tuple(Kind(item) for item in values))
        except ValueError as error:
            known = " or ".join(kind.value for kind in Kind)
            raise ValueError(f"{where}: when.kind: {error}; name {known}.") from None
    _check_words(where, spec, field, values)
    return OneOf(tuple(values))


def _type_of(spec: Any, field: str) -> type | None:
    """The type of a field's values, where it is one that TOML has."""
    kind = int if field == "capability" else type(spec._field_defaults.get(field))
    return kind if kind in (int, str, bool) else None


def _check_span(key: str, span: Mapping[str, Any], least: int) -> None:
    """Refuse bounds that no number meets: such a rule would silently match nothing."""
    if not span:
        fail(key, "{}", "a span of min, max or multiple_of", "Leave it out for any.")
    low, high, step = span.get("min", least), span.get("max"), span.get("multiple_of", 1)
    if step < 1:
        fail(f"{key}.multiple_of", step, "1 or more", "Leave it out for any.")
    if high is not None and high < max(low, least):
        bound = f"min, {low}" if low > least else f"{least}, the least there is"
        fail(f"{key}.max", high, f"at least {bound}", "Swap or mend the bounds.")
    if high is not None and high // step * step < low:
        required = f"a span that holds a multiple of {step}"
        fail(key, f"{low} to {high}", required, "Widen the bounds.")


_EXAMPLES = {int: "128", str: '"cuda"', bool: "true"}


def _check_words(where: str, spec: Any, field: str, values: list[object]) -> None:
    """Refuse values that the field never has: such a rule would silently match nothing."""
    words = CHOICES.get(field)
    kind = _type_of(spec, field)
    for value in values:
        if words is not None and value not in words:
            remedy = "Leave the key out for any."
            fail(f"{where}: when.{field}", repr(value), f"one of {', '.join(words)}", remedy)
        if kind is not None and type(value) is not kind:
            example = "90, an H100's" if field == "capability" else _EXAMPLES[kind]
            remedy = f"Write it as {example}."
            fail(f"{where}: when.{field}", repr(value), f"of type {kind.__name__}", remedy)
        if type(value) is int and value < LEAST.get(field, 0):
            remedy = "Leave the key out for any."
            fail(f"{where}: when.{field}", value, f"{LEAST.get(field, 0)} or more", remedy)


def _entry(where: str, text: object) -> Entry:
    parts = text.split("+") if isinstance(text, str) else []
    if len(parts) not in (1, 2) or not all(parts):
        raise ValueError(
            f'{where}: prefer holds {text!r}; entries are "name" or "name+name". '
            '"triton+eager" is triton forward and eager backward.'
        )
    return Entry(parts[0], parts[-1])


def parse_policy(data: Mapping[str, object], where: str) -> Policy:
    """A Policy from parsed TOML; ``where`` names the source in errors.

    Raises:
        ValueError: an unknown key, field or malformed entry.
    """
    unknown = set(data) - {"name", "rule"}
    rules = data.get("rule")
    if unknown or not isinstance(rules, list) or not rules:
        raise ValueError(
            f"{where}: a policy has name and [[rule]] tables; got {sorted(data)}. "
            'The least is [[rule]] with prefer = ["eager"].'
        )
    parsed: list[Rule] = []
    # From 1, as explain() names the rule that decided.
    for position, rule in enumerate(rules, 1):
        place = f"{where}: rule {position}"
        if not isinstance(rule, Mapping):
            fail(place, repr(rule), "a table", "Begin it with a line [[rule]].")
        unknown = set(rule) - {"operation", "when", "prefer", "why"}
        if unknown:
            known = "prefer, when, why and operation"
            raise ValueError(
                f"{place} has unknown keys {sorted(unknown)}; known: {known}. "
                "Fields of a call belong into when."
            )
        prefer = rule.get("prefer")
        if not isinstance(prefer, list) or not prefer:
            found = repr(prefer) if "prefer" in rule else "missing"
            raise ValueError(
                f"{place}: prefer is {found}; it must be a non-empty list of backend names, "
                'as in prefer = ["triton", "eager"].'
            )
        when = rule.get("when", {})
        if not isinstance(when, Mapping):
            fail(f"{place}: when", repr(when), "a table", 'Write when = { dtype = "bfloat16" }.')
        operation = _operation(place, rule.get("operation", "attention"))
        parsed.append(
            Rule(
                tuple(
                    (field, _allowed(place, operation, field, value))
                    for field, value in when.items()
                ),
                tuple(_entry(place, entry) for entry in prefer),
                str(rule.get("why", "")),
                operation,
            )
        )
    return Policy(str(data.get("name", where)), tuple(parsed))


def load_policy(path: str | Path) -> Policy:
    """Read a policy file.

    Raises:
        TypeError: it is no path.
        OSError: the file cannot be read.
        ValueError: it is not valid TOML or not a valid policy.
    """
    if not isinstance(path, (str, Path)):
        remedy = "parse_policy() takes a dict."
        fail("policy", repr(path), "a Policy or the path of a file", remedy, TypeError)
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        text = f"policy is {str(path)!r}; it must be a file that can be read ({error.strerror})."
        raise type(error)(f"{text} Check the path.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    return parse_policy(parse_toml(text, path), str(path))


@lru_cache(maxsize=1)
def default_policy() -> Policy:
    """The policy shipped in ``configs/policy/default.toml``."""
    source = resources.files("csa_dispatch_configs") / "policy" / "default.toml"
    return parse_policy(tomllib.loads(source.read_text(encoding="utf-8")), "default policy")


def policy_about(operation: str, policy: Policy) -> Policy:
    """``policy``, or the shipped one when it says nothing of an operation."""
    if any(rule.operation == operation for rule in policy.rules):
        return policy
    return default_policy()


@lru_cache(maxsize=8)
def _load_from_environment(path: str) -> Policy:
    try:
        return load_policy(path)
    except (OSError, ValueError) as error:
        raise type(error)(f"CSA_DISPATCH_POLICY: {error}") from None


_context: ContextVar[Policy | None] = ContextVar("csa_dispatch_policy", default=None)


def current_policy(environment_path: str | None) -> Policy:
    """The policy in force: the context's, else the environment's file, else the default."""
    policy = _context.get()
    if policy is not None:
        return policy
    if environment_path is not None:
        return _load_from_environment(environment_path)
    return default_policy()


@contextmanager
def use_policy(policy: Policy | str | Path) -> Iterator[Policy]:
    """Route by ``policy`` (or the policy file at that path) inside the block.

    Raises:
        TypeError, OSError, ValueError: as ``load_policy``.
    """
    loaded = policy if isinstance(policy, Policy) else load_policy(policy)
    token = _context.set(loaded)
    try:
        yield loaded
    finally:
        _context.reset(token)
