"""Cases generated from a backend's Capabilities: an economical set inside, boundaries outside.

``cases_for`` covers every pair of axis values that the backend claims at least once, which finds
the faults of two interacting features with a hundred-odd cases where the full product has
millions. ``boundaries_for`` steps just outside each bound, one field at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from csa_dispatch.call import Kind
from csa_dispatch.call_spec import CallSpec
from csa_dispatch.capabilities import ANY, Allowed, Capabilities
from csa_dispatch.validation import fail

from .cases import CONTENTS, Case

AXES: dict[str, tuple[object, ...]] = {
    "needs_grad": tuple(itertools.product((True, False), repeat=4)),
    "kind": (Kind.GATHER, Kind.DENSE, Kind.WINDOW),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "documents": ("none", "cu_seqlens", "doc_ids"),
    "sink": ("float32", "none", "same"),
    "heads": (16, 1, 3, 40, 64, 96, 128),
    "kv_heads": (1, 2),
    "head_dim": (64, 16, 80, 128, 192, 256, 512),
    "memory": ("contiguous", "transposed", "padded", "expanded", "strided"),
    "index_dtype": ("int32", "int64"),
    "content": ("messy", *(name for name in CONTENTS if name not in ("messy", "nan"))),
    "window": (5, 0, 1, 64),
    "compress_ratio": (4, 1, 7),
    "batch": (1, 3),
    "tokens": (33,),
    "pool": (20, 6),
    "slots": (9,),
}
"""Values worth testing; what a backend claims beside them (``Allowed.inside``) is added."""

_LARGEST = {
    "heads": 256,
    "head_dim": 1024,
    "tokens": 1024,
    "pool": 4096,
    "slots": 2048,
    "batch": 8,
}
"""Above these a case costs the oracle more than it teaches."""

_TRIES = 24
"""Random completions of a pair that are looked at; the one that covers most new pairs wins."""

Pair = tuple[tuple[str, object], tuple[str, object]]


def cases_for(
    forward: Capabilities,
    backward: Capabilities | None = None,
    *,
    device_type: str = "cpu",
    capability: int | None = None,
    axes: Mapping[str, Iterable[object]] | None = None,
    strength: int = 2,
    seed: int = 0,
) -> list[Case]:
    """A covering set of cases that a backend claims.

    Args:
        forward: what its forward supports.
        backward: what its backward supports; None leaves only cases without gradients.
        device_type: device the cases will run on.
        capability: its CUDA compute capability as ``major * 10 + minor``.
        axes: values that replace those of ``AXES`` by name, e.g. ``{"heads": (8,)}``.
        strength: 2 covers each pair of values, 1 each value.
        seed: of the choice among equally good sets.

    Returns:
        Cases with consecutive seeds; empty when nothing is claimed on that device.
    """
    if strength not in (1, 2):
        fail("strength", strength, "1 or 2", "2 crosses every two axes.")
    chosen = {**AXES, **{name: tuple(values) for name, values in (axes or {}).items()}}
    unknown = sorted(set(chosen) - {field.name for field in dataclasses.fields(Case)})
    if unknown:
        remedy = "Name the fields to vary, as tokens or dtype."
        fail("axes", unknown, "fields of a Case", remedy)
    if backward is None:
        chosen["needs_grad"] = ((False, False, False, False),)
    fixed = frozenset(axes or {})
    given = {"device_type": device_type, "capability": capability, "tracing": False}
    if any(value not in _bound(forward, name) for name, value in given.items()):
        return []
    values = {
        name: _axis_values(name, options, forward, backward, fixed)
        for name, options in chosen.items()
    }

    def claimed(case: Case) -> bool:
        return claims(forward, backward, case.spec(device_type, capability))

    rng = random.Random(seed)
    wanted = _targets(values, strength)
    found: list[Case] = []
    while wanted:
        target = next(iter(wanted))
        best: Case | None = None
        most: set[tuple[tuple[str, object], ...]] = set()
        for _ in range(_TRIES):
            case = _complete(dict(target), values, rng)
            if case is None or not claimed(case):
                continue
            covers = _covered(case, values, strength) & wanted.keys()
            if target in covers and len(covers) > len(most):
                best, most = case, covers
        if best is None:
            del wanted[target]
            continue
        for item in most:
            del wanted[item]
        found.append(dataclasses.replace(best, seed=seed + len(found)))
    return found


def claims(forward: Capabilities, backward: Capabilities | None, spec: CallSpec) -> bool:
    """Whether a backend with these capabilities says that it can run ``spec``."""
    if forward.reasons(spec):
        return False
    if not spec.differentiable:
        return True
    return backward is not None and not backward.reasons(spec)


def _axis_values(
    name: str,
    options: tuple[object, ...],
    forward: Capabilities,
    backward: Capabilities | None,
    fixed: frozenset[str],
) -> tuple[object, ...]:
    """``options`` within the forward's claim, and what the claim itself holds worth testing."""
    bounds = [_bound(side, name) for side in (forward, backward) if side is not None]
    extra = () if name in fixed else [v for bound in bounds for v in bound.inside()]
    largest = _LARGEST.get(name)
    return tuple(
        value
        for value in dict.fromkeys([*options, *extra])
        # "same" is the case's word for the query's dtype, which only the whole case knows.
        if (value in bounds[0] or (name, value) == ("sink", "same"))
        and not (largest is not None and isinstance(value, int) and value > largest)
    )


def _bound(side: Capabilities, name: str) -> Allowed:
    return side.bounds().get(name, ANY)


def _targets(values: Mapping[str, tuple[object, ...]], strength: int) -> dict[tuple, None]:
    """Every single value or pair of values to cover, pairs of the longest axes first."""
    names = sorted(values, key=lambda name: -len(values[name]))
    items = []
    for group in itertools.combinations(names, strength):
        ordered = sorted(group)
        for choice in itertools.product(*(values[name] for name in ordered)):
            items.append(tuple(zip(ordered, choice, strict=True)))
    return dict.fromkeys(items)


def _covered(case: Case, values: Mapping[str, tuple[object, ...]], strength: int) -> set[tuple]:
    mine = [(name, getattr(case, name)) for name in sorted(values)]
    return set(itertools.combinations(mine, strength))


def _complete(
    settled: dict[str, object], values: Mapping[str, tuple[object, ...]], rng: random.Random
) -> Case | None:
    """A case with the settled fields and random others; None when no valid one exists."""
    fields = {}
    for name, options in values.items():
        if name not in settled and not options:
            return None
        fields[name] = settled[name] if name in settled else rng.choice(options)
    try:
        return Case(**fields)  # pyright: ignore[reportArgumentType]
    except ValueError:
        return None


class Boundary(NamedTuple):
    """A call just outside one bound of a claim.

    Attributes:
        field: the CallSpec field that must be among the Reasons.
        spec: the call.
        case: the same as a case that can be built, or None when the field is not of a case
            (another device, tracing) or the call would be invalid or too large anyway.
    """

    field: str
    spec: CallSpec
    case: Case | None


def boundaries_for(
    forward: Capabilities,
    backward: Capabilities | None = None,
    *,
    device_type: str = "cpu",
    capability: int | None = None,
) -> list[Boundary]:
    """A call for each value just outside each bound, from a claimed one by changing that field.

    Every one of them must be refused, with a Reason of that field among the others.
    """
    bases = cases_for(
        forward, backward, device_type=device_type, capability=capability, strength=1
    )
    found: list[Boundary] = []
    for side in (forward, backward):
        if side is None:
            continue
        for name, allowed in side.bounds().items():
            for value in allowed.outside():
                boundary = _boundary(name, value, bases, side, device_type, capability)
                if boundary is not None and boundary not in found:
                    found.append(boundary)
    return found


def _boundary(
    name: str,
    value: object,
    bases: list[Case],
    side: Capabilities,
    device_type: str,
    capability: int | None,
) -> Boundary | None:
    """The call with ``value`` in field ``name`` that breaks fewest other bounds of ``side``."""
    best: tuple[int, Boundary] | None = None
    for base in bases:
        case = _with(base, name, value)
        if case is None:
            continue
        spec = case.spec(device_type, capability)
        broken = [reason.field for reason in side.reasons(spec)]
        kept = getattr(spec, name) == value and name in broken
        if kept and (best is None or len(broken) < best[0]):
            best = (len(broken), Boundary(name, spec, case))
    if best is not None:
        return best[1]
    for base in bases:
        spec = base.spec(device_type, capability)._replace(**{name: value})
        if name in (reason.field for reason in side.reasons(spec)):
            return Boundary(name, spec, None)
    return None


def _with(base: Case, name: str, value: object) -> Case | None:
    """``base`` with one CallSpec field changed; None when a case can't express that."""
    if name == "strides":
        memory = {"aligned": "contiguous", "unit": "padded", "any": "strided"}
        return dataclasses.replace(base, memory=memory[str(value)])
    if name not in AXES and name != "deterministic":
        return None
    if isinstance(value, int) and value > _LARGEST.get(name, value):
        return None
    changed = {name: value}
    if value is Kind.DENSE and not base.compress_ratio:
        changed["compress_ratio"] = AXES["compress_ratio"][0]
    try:
        return dataclasses.replace(base, **changed)  # pyright: ignore[reportArgumentType]
    except ValueError:
        return None
