"""Policies: ordered TOML rules that give the preference order of backends for a call.

A policy file::

    name = "my cluster"

    [[rule]]
    why = "measured on our H200s"
    when = { device_type = "cuda", capability = { min = 90, max = 90 }, dtype = "bfloat16" }
    prefer = ["triton", "triton+cudnn", "eager"]

    [[rule]]
    prefer = ["eager"]

The first rule whose ``when`` matches decides. Keys of ``when`` are CallSpec fields; a value is
one value, a list of values, or ``{ min, max, multiple_of }``. An entry ``"a+b"`` runs forward
on a and backward on b.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from .call import Kind
from .call_spec import CallSpec
from .capabilities import Allowed, Between, OneOf

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
    """Preference order for the calls that ``when`` matches."""

    when: tuple[tuple[str, Allowed], ...]
    prefer: tuple[Entry, ...]
    why: str

    def matches(self, spec: CallSpec) -> bool:
        return all(getattr(spec, field) in allowed for field, allowed in self.when)


class Policy(NamedTuple):
    """Ordered rules; hashable, so that decisions are cached by it."""

    name: str
    rules: tuple[Rule, ...]

    def rule_for(self, spec: CallSpec) -> tuple[int, Rule]:
        """The first matching rule and its position.

        Raises:
            ValueError: no rule matches.
        """
        for position, rule in enumerate(self.rules):
            if rule.matches(spec):
                return position, rule
        raise ValueError(
            f"policy {self.name!r} has no rule for {spec}; end it with one without when."
        )


def _allowed(where: str, field: str, value: object) -> Allowed:
    if field not in CallSpec._fields:
        raise ValueError(
            f"{where}: when.{field} is not a CallSpec field; known: {', '.join(CallSpec._fields)}."
        )
    if isinstance(value, Mapping):
        unknown = set(value) - {"min", "max", "multiple_of"}
        if unknown:
            raise ValueError(f"{where}: when.{field} has unknown keys {sorted(unknown)}.")
        return Between(value.get("min", 0), value.get("max"), value.get("multiple_of", 1))
    values = value if isinstance(value, list) else [value]
    if field == "kind":
        try:
            return OneOf(tuple(Kind(item) for item in values))
        except ValueError as error:
            raise ValueError(f"{where}: when.kind: {error}.") from None
    return OneOf(tuple(values))


def _entry(where: str, text: object) -> Entry:
    parts = text.split("+") if isinstance(text, str) else []
    if len(parts) not in (1, 2) or not all(parts):
        raise ValueError(f'{where}: prefer holds {text!r}; entries are "name" or "name+name".')
    return Entry(parts[0], parts[-1])


def parse_policy(data: Mapping[str, object], where: str) -> Policy:
    """A Policy from parsed TOML; ``where`` names the source in errors.

    Raises:
        ValueError: an unknown key, field or malformed entry.
    """
    unknown = set(data) - {"name", "rule"}
    rules = data.get("rule")
    if unknown or not isinstance(rules, list) or not rules:
        raise ValueError(f"{where}: a policy has name and [[rule]] tables; got {sorted(data)}.")
    parsed: list[Rule] = []
    for position, rule in enumerate(rules):
        place = f"{where}: rule {position}"
        unknown = set(rule) - {"when", "prefer", "why"}
        prefer = rule.get("prefer")
        if unknown or not isinstance(prefer, list) or not prefer:
            raise ValueError(f"{place} has prefer, when and why; got {sorted(rule)}.")
        when = rule.get("when", {})
        parsed.append(
            Rule(
                tuple((field, _allowed(place, field, value)) for field, value in when.items()),
                tuple(_entry(place, entry) for entry in prefer),
                str(rule.get("why", "")),
            )
        )
    return Policy(str(data.get("name", where)), tuple(parsed))


def load_policy(path: str | Path) -> Policy:
    """Read a policy file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not valid TOML or not a valid policy.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    return parse_policy(data, str(path))


@lru_cache(maxsize=1)
def default_policy() -> Policy:
    """The policy shipped in ``configs/policy/default.toml``."""
    source = resources.files("csa_dispatch_configs") / "policy" / "default.toml"
    return parse_policy(tomllib.loads(source.read_text(encoding="utf-8")), "default policy")


_load_from_environment = lru_cache(maxsize=8)(load_policy)
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
        FileNotFoundError, ValueError: as ``load_policy``.
    """
    loaded = policy if isinstance(policy, Policy) else load_policy(policy)
    token = _context.set(loaded)
    try:
        yield loaded
    finally:
        _context.reset(token)
