"""The calls the conformance kit makes: small ones within the claim, a family per promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from csa_dispatch.call import Kind
from csa_dispatch.capabilities import ANY, Capabilities

from .cases import MEMORY, Case
from .covering import AXES

Axes = Mapping[str, tuple[object, ...]]

ALL = (True, True, True, True)
NONE = (False, False, False, False)
DTYPES = AXES["dtype"]
KINDS = AXES["kind"]

BASE: dict[str, tuple[object, ...]] = {
    "needs_grad": (ALL,),
    "kind": KINDS,
    "dtype": DTYPES,
    "documents": ("none",),
    "sink": ("none",),
    "heads": (4,),
    "kv_heads": (1,),
    "head_dim": (16,),
    "memory": ("contiguous",),
    "index_dtype": ("int32",),
    "content": ("random",),
    "window": (3,),
    "compress_ratio": (2,),
    "batch": (1,),
    "tokens": (11,),
    "pool": (6,),
    "slots": (5,),
}
"""One small call of every kind and dtype; a family replaces the axes that it is about.

There is no sink, so that what is wrong with sinks shows where sinks are looked at.
"""

_SIZES = frozenset(
    {"heads", "kv_heads", "head_dim", "window", "compress_ratio", "batch", "tokens", "pool",
     "slots"}
)  # fmt: skip
"""Axes of which some values are as good as others."""


class Family(NamedTuple):
    """A promise, and the calls that would show it broken.

    Attributes:
        name: the check's.
        promise: what must hold.
        axes: what the calls vary, beside kind and dtype.
    """

    name: str
    promise: str
    axes: Axes


FAMILIES = (
    Family(
        "claims",
        "calls across the claim lie within their error budgets",
        {
            "needs_grad": (ALL, NONE),
            "documents": AXES["documents"],
            "sink": AXES["sink"],
            "heads": (4, 1, 20),
            "kv_heads": (1, 2),
            "head_dim": (16, 80),
            "memory": MEMORY,
            "index_dtype": AXES["index_dtype"],
            "window": (3, 0, 1, 64),
            "compress_ratio": (2, 1, 4),
            "batch": (1, 2),
        },
    ),
    Family(
        "window",
        "a window of W holds the query's own row and the W - 1 before it",
        {"window": (3, 0, 1, 2, 64)},
    ),
    Family(
        "slots",
        "a slot is used or not by its value alone, wherever it stands",
        {"kind": (Kind.GATHER,), "content": ("scattered",), "index_dtype": AXES["index_dtype"],
         "window": (0, 3)},
    ),
    Family(
        "duplicates",
        "a repeated slot counts as often as it occurs, forward and backward",
        {"kind": (Kind.GATHER,), "content": ("duplicates",), "slots": (9, 5)},
    ),
    Family(
        "compressed",
        "a dense-compressed query sees the complete entries before it alone",
        {"kind": (Kind.DENSE,), "compress_ratio": (2, 1, 4, 7), "pool": (6, 3)},
    ),
    Family(
        "documents",
        "packed documents see themselves alone; empty ones, spare rows",
        {"documents": ("cu_seqlens", "doc_ids"), "content": ("messy", "random"), "slots": (5, 9)},
    ),
    Family(
        "empty_rows",
        "rows without keys: output 0, lse the sink or -inf, gradients 0",
        {"window": (0,), "content": ("scattered", "messy"), "sink": ("float32", "none"),
         "pool": (6, 0)},
    ),
    Family(
        "sinks",
        "the sink is an unscaled logit in the denominator, infinite ones too",
        {"sink": AXES["sink"], "content": ("messy", "random")},
    ),
    Family(
        "scale",
        "the scale multiplies the logits and nothing else",
        {"scale": (0.5, None, 1.0)},
    ),
    Family(
        "poison",
        "NaN and Inf that nobody may read reach no result",
        {"content": ("poisoned", "messy"), "window": (3, 0)},
    ),
    Family(
        "nan",
        "NaN in a selected row reaches what sees it, and nothing else",
        {"content": ("nan",)},
    ),
    Family(
        "heads",
        "any claimed number of heads, each reading the KV head of its group",
        {"heads": (4, 1, 20, 6), "kv_heads": (1, 2)},
    ),
    Family(
        "head_dim",
        "every claimed head_dim to its last column",
        {"head_dim": (16, 80, 24)},
    ),
    Family(
        "sizes",
        "tokens, slots, entries and windows past a kernel's first tiles count",
        {"tokens": (150,), "slots": (70,), "pool": (90,), "window": (3, 140)},
    ),
    Family(
        "batch",
        "batch entries are apart",
        {"batch": (3,), "content": ("random", "messy")},
    ),
    Family(
        "strides",
        "any strides, expanded tensors and upstream gradients included",
        {"memory": MEMORY, "batch": (2,), "documents": AXES["documents"], "sink": AXES["sink"]},
    ),
    Family(
        "gradients",
        "exactly the gradients asked for, each right; the others None",
        {"needs_grad": tuple(itertools.product((True, False), repeat=4)), "sink": ("float32",)},
    ),
)  # fmt: skip

MESSY: Axes = {
    "content": ("messy",),
    "memory": MEMORY,
    "documents": AXES["documents"],
    "sink": AXES["sink"],
    "head_dim": (16, 80),
    "window": (3, 0),
}
"""What the checks that are not about numbers run: all that is nasty, in few calls."""


Sides = tuple[Capabilities, Capabilities | None]
Find = Callable[..., list[Case]]
"""``cases_for`` of the sides on the device: ``axes`` and ``strength`` are left to give."""


def device_bases(sides: Sides, find: Find) -> list[Axes]:
    """``BASE`` as a device takes it, for every kind; kinds that share one come together.

    Bounds hold on every device; what a backend refuses on one alone its predicates say, of whole
    calls.
    """
    of_kind = {kind: _nearest_base(kind, sides, find) for kind in KINDS}
    found: list[Axes] = []
    for base in of_kind.values():
        kinds = tuple(kind for kind in KINDS if of_kind[kind] == base)
        if {**base, "kind": kinds} not in found:
            found.append({**base, "kind": kinds})
    return found


def _nearest_base(kind: object, sides: Sides, find: Find) -> Axes:
    """``BASE``, or the sizes nearest to it of which calls of ``kind`` are claimed.

    They are asked for no gradients where those are claimed of no such call.
    """

    def fitted(base: Axes) -> Axes:
        return {**fitted_axes(*sides, {}, base), "kind": (kind,)}

    def claimed(base: Axes) -> bool:
        return bool(find(axes=fitted(base), strength=1))

    for needs_grad in (ALL, NONE):
        base = {**BASE, "needs_grad": (needs_grad,)}
        if claimed(base):
            return base
        free = {name: values for name, values in fitted(base).items() if name not in _SIZES}
        for case in find(axes=free, strength=1)[:1]:
            base |= {name: (getattr(case, name),) for name in _SIZES}
            for name in sorted(_SIZES):
                nearer = {**base, name: BASE[name]}
                base = nearer if claimed(nearer) else base
            return base
    return BASE


def device_axes(axes: Axes, base: Axes, sides: Sides, find: Find) -> Axes:
    """``fitted_axes``, with the sizes of ``base`` where the device takes none of those named."""

    def claimed(name: str, value: object) -> bool:
        return bool(find(axes=fitted_axes(*sides, {name: (value,)}, base), strength=1))

    kinds = tuple(kind for kind in axes.get("kind", KINDS) if kind in base["kind"])
    found = {**axes, "kind": kinds}
    for name in sorted(_SIZES & axes.keys()):
        # Where the usual size is taken, it is among those named.
        if base[name] != BASE[name] and len(axes[name]) > 1:
            values = tuple(value for value in axes[name] if claimed(name, value))
            found[name] = values or base[name]
    return fitted_axes(*sides, found, base)


def fitted_axes(
    forward: Capabilities, backward: Capabilities | None, axes: Axes, base: Axes = BASE
) -> Axes:
    """``axes`` over ``base``, with sizes that are claimed where those named are not.

    What ``axes`` gives a single value is what the calls are about and stays: where it is not
    claimed, no case results.
    """
    found = dict(axes)
    for name, values in {**base, **axes}.items():
        if name not in axes or (name in _SIZES and len(values) > 1):
            found[name] = _claimed_or_own(name, values, forward, backward)
    return found


def _claimed_or_own(
    name: str, values: tuple[object, ...], forward: Capabilities, backward: Capabilities | None
) -> tuple[object, ...]:
    """Those of ``values`` that are claimed, or else two of the claim's own."""
    bounds = [side.bounds().get(name, ANY) for side in (forward, backward) if side is not None]
    own = [value for bound in bounds for value in bound.inside()]

    def claimed(options: Iterable[object]) -> tuple[object, ...]:
        return tuple(value for value in options if all(value in bound for bound in bounds))

    return claimed(values) or claimed(own)[:2] or claimed(AXES.get(name, ())) or values
