"""Suites: TOML files that say which calls a benchmark times, and how fast they must be.

A suite file::

    name = "mine"
    summary = "what it is for"
    device = "cuda"                 # default of --device
    backends = ["triton"]           # default of --backend; left out: every known one

    [effort]                        # all optional
    rounds = 10                     # turns that every backend takes, in rotating order
    seconds = 0.5                   # measured time of each backend on each call
    flush_l2 = true                 # overwrite the L2 cache before every sample (CUDA)

    [base]                          # fields of every case, unless the case has its own
    heads = 64

    [[case]]
    name = "A causal"
    tokens = 4096                   # or a list: one call for each, drawn against T
    indices = "causal"              # full, causal or messy; see ``inputs``
    directions = ["forward", "backward", "both"]
    must_ms = { forward = 0.65, backward = 2.05 }
    goal_ms = { forward = 0.58, backward = 1.7 }

``pool`` is ``tokens // compress_ratio`` when left out. Besides ``must_ms``, a case can ask for
``must_like = "NAME"`` (not slower than the same backend on that case, which precedes it),
``must_growth = 1.1`` (time per token over a list of tokens, against the shortest that was timed)
and ``must_extra_mib`` (extra memory, by direction). A case's own limits are for directions that it
times; those of ``[base]`` hold where a case times theirs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csa_dispatch.call import Kind
from csa_dispatch.config_files import load_config, shipped_configs
from csa_dispatch.toml_table import MOST, TomlTable
from csa_dispatch.validation import MAX_ROWS
from csa_dispatch.wording import quoted

DIRECTIONS = ("forward", "backward", "both")
"""``both`` is one timed region: a forward and then the backward of its results."""

INDICES = ("full", "causal", "messy")
DEVICES = ("cpu", "cuda")
_WORDS = {
    "kind": tuple(kind.value for kind in Kind),
    "dtype": ("bfloat16", "float16", "float32", "float64"),
    "index_dtype": ("int32", "int64"),
    "sink": ("float32", "same", "none"),
    "indices": INDICES,
}
_SIZES = {
    "batch": 1,
    "heads": 64,
    "kv_heads": 1,
    "head_dim": 512,
    "slots": 512,
    "window": 128,
    "compress_ratio": 4,
    "seed": 0,
}
_POSITIVE = ("batch", "heads", "kv_heads", "tokens", "head_dim", "compress_ratio")
_MOST = {"window": sys.maxsize, "seed": MOST}
"""The most of what may be above ``MAX_ROWS``."""

_BY_DIRECTION = ("must_ms", "goal_ms", "must_extra_mib")


@dataclass(frozen=True)
class Limits:
    """What a case must and should reach; the mappings are by direction.

    Attributes:
        must_ms, goal_ms: median time in milliseconds.
        must_extra_mib: extra memory in MiB.
        must_like: name of a case that this one may not be slower than.
        must_growth: largest time per token, relative to the shortest call timed of the series.
    """

    must_ms: Mapping[str, float] = field(default_factory=dict)
    goal_ms: Mapping[str, float] = field(default_factory=dict)
    must_extra_mib: Mapping[str, float] = field(default_factory=dict)
    must_like: str = ""
    must_growth: float | None = None


@dataclass(frozen=True)
class BenchCase:
    """One call to time, without its data; sizes mean what they do in a CallSpec.

    Attributes:
        name: unique in its suite.
        series: the name in the file, shared by calls that differ in ``tokens`` alone.
        indices: contents of kv_indices, one of ``INDICES``.
        sink: its dtype's name, ``"same"`` for the query's, or ``"none"``.
        directions: which of ``DIRECTIONS`` are timed.
        deterministic: under torch's deterministic algorithms.
    """

    name: str
    series: str
    kind: Kind
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    pool: int
    slots: int
    window: int
    compress_ratio: int
    index_dtype: str
    sink: str
    indices: str
    seed: int
    directions: tuple[str, ...]
    deterministic: bool
    limits: Limits


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: turns that every backend takes.
        seconds: measured time of each backend on each call; slow ones get at least 3 samples.
        flush_l2: overwrite the L2 cache before every sample, on CUDA.
    """

    rounds: int = 10
    seconds: float = 0.5
    flush_l2: bool = True


@dataclass(frozen=True)
class Suite:
    """A parsed suite file."""

    name: str
    cases: tuple[BenchCase, ...]
    path: str = ""
    summary: str = ""
    device: str = "cpu"
    backends: tuple[str, ...] = ()
    effort: Effort = Effort()


def load_suite(path: str | Path) -> Suite:
    """Read a suite file; a name that is no file is also looked for among the shipped ones.

    Raises:
        ValueError: no such file, not TOML, or a malformed key; one line that names both.
    """
    return parse_suite(load_config(path, "bench"), str(path))


def shipped_suites() -> list[str]:
    """Names of the suite files in ``configs/bench``."""
    return shipped_configs("bench")


def parse_suite(data: Mapping[str, Any], path: str) -> Suite:
    """A Suite from parsed TOML; ``path`` names it in errors.

    Raises:
        ValueError: an unknown or malformed key.
    """
    top = TomlTable(data, path, "")
    top.only("name", "summary", "device", "backends", "effort", "base", "case")
    listed = data.get("case")
    if not isinstance(listed, list) or not listed:
        raise top.error("case", "a suite has at least one [[case]] table")
    base = top.table("base")
    base.never("name", why="every case has its own")
    cases: list[BenchCase] = []
    judged: set[tuple[str, str]] = set()
    for position, item in enumerate(listed):
        where = f"case[{position}]."
        own = TomlTable(item, path, where)
        table = TomlTable({**base.data, **own.data}, path, where)
        taken = {text for known in cases for text in (known.name, known.series)}
        for case in _cases(table):
            for name in (case.name, case.series):
                if name in taken:
                    raise table.error("name", f"{quoted(name)} is the name of two cases")
            taken.add(case.name)
            _check_like(table, case, cases)
            _check_directions(own, case)
            inherited = [key for key in _BY_DIRECTION if key not in own.data]
            judged.update((key, direction) for key in inherited for direction in case.directions)
            cases.append(case)
    for key in _BY_DIRECTION:
        for direction in base.table(key).data:
            if (key, direction) not in judged:
                text = "no case that takes it from base times this direction; drop it"
                raise base.table(key).error(direction, text)
    return Suite(
        name=top.name("name"),
        cases=tuple(cases),
        path=path,
        summary=top.text("summary", ""),
        device=top.word("device", DEVICES, "cpu"),
        backends=top.texts("backends"),
        effort=_effort(top.table("effort")),
    )


def _effort(table: TomlTable) -> Effort:
    table.only(*(item.name for item in dataclasses.fields(Effort)))
    rounds = table.count("rounds", Effort.rounds, least=1)
    flush = table.flag("flush_l2") if "flush_l2" in table.data else Effort.flush_l2
    return Effort(rounds, _number(table, "seconds", Effort.seconds), flush)


def _cases(table: TomlTable) -> list[BenchCase]:
    """One case, or one for each of its ``tokens``."""
    limits = [item.name for item in dataclasses.fields(Limits)]
    own = [item.name for item in dataclasses.fields(BenchCase)]
    table.only(*(name for name in own if name not in ("series", "limits")), *limits)
    tokens = table.data.get("tokens", 4096)
    swept = isinstance(tokens, list)
    if swept and not tokens:
        raise table.error("tokens", "is an empty list")
    if "must_growth" in table.data and not swept:
        raise table.error("must_growth", "only a case with a list of tokens has it")
    return [
        _case(TomlTable({**table.data, "tokens": count}, table.path, table.where), swept)
        for count in (tokens if swept else [tokens])
    ]


def _case(table: TomlTable, swept: bool) -> BenchCase:
    series = table.name("name")
    sizes = {key: _size(table, key, default) for key, default in _SIZES.items()}
    sizes["tokens"] = _size(table, "tokens")
    if sizes["heads"] % sizes["kv_heads"]:
        text = f"{sizes['kv_heads']} does not divide heads {sizes['heads']}"
        raise table.error("kv_heads", text)
    kind = Kind(table.word("kind", _WORDS["kind"], "gather"))
    sizes["pool"] = _size(table, "pool", sizes["tokens"] // sizes["compress_ratio"])
    if kind is Kind.WINDOW:
        sizes["pool"] = 0
    if kind is not Kind.GATHER:
        sizes["slots"] = 0
    directions = table.texts("directions") or ("forward", "backward")
    for direction in directions:
        _known_direction(table, "directions", direction)
        if directions.count(direction) > 1:
            raise table.error("directions", f"{direction!r} is listed twice; list it once")
    return BenchCase(
        name=f"{series} T={sizes['tokens']}" if swept else series,
        series=series,
        kind=kind,
        dtype=table.word("dtype", _WORDS["dtype"], "bfloat16"),
        index_dtype=table.word("index_dtype", _WORDS["index_dtype"], "int32"),
        sink=table.word("sink", _WORDS["sink"], "float32"),
        indices=table.word("indices", INDICES, "causal"),
        directions=directions,
        deterministic=table.flag("deterministic"),
        limits=_limits(table),
        **sizes,
    )


def _size(table: TomlTable, key: str, default: int | None = None) -> int:
    least = 1 if key in _POSITIVE else 0
    return table.count(key, default, least=least, most=_MOST.get(key, MAX_ROWS))


def _check_like(table: TomlTable, case: BenchCase, before: list[BenchCase]) -> None:
    """Refuse a ``must_like`` that nothing can be held against."""
    name = case.limits.must_like
    if not name:
        return
    like = next((known for known in before if known.name == name), None)
    if like is None:
        raise table.error("must_like", f"{quoted(name)} is not a case before this one")
    if not set(like.directions) & set(case.directions):
        text = f"{quoted(name)} times {', '.join(like.directions)} and this case none of them"
        raise table.error("must_like", f"{text}; give both a direction, or drop it")


def _check_directions(own: TomlTable, case: BenchCase) -> None:
    """Refuse a case's own limits on directions that it does not time."""
    for key in _BY_DIRECTION:
        inner = own.table(key)
        for direction in inner.data:
            if direction not in case.directions:
                text = f"the case times {', '.join(case.directions)} alone"
                raise inner.error(direction, f"{text}; add it to directions, or drop the limit")


def _limits(table: TomlTable) -> Limits:
    growth = table.data.get("must_growth")
    return Limits(
        must_ms=_by_direction(table, "must_ms"),
        goal_ms=_by_direction(table, "goal_ms"),
        must_extra_mib=_by_direction(table, "must_extra_mib"),
        must_like=table.text("must_like", ""),
        must_growth=None if growth is None else _number(table, "must_growth", 0.0),
    )


def _by_direction(table: TomlTable, key: str) -> dict[str, float]:
    inner = table.table(key)
    for direction in inner.data:
        _known_direction(inner, direction, direction)
    return {direction: _number(inner, direction, 0.0) for direction in inner.data}


def _known_direction(table: TomlTable, key: str, direction: str) -> None:
    if direction not in DIRECTIONS:
        raise table.error(key, f"{quoted(direction)} is not one of {', '.join(DIRECTIONS)}")


def _number(table: TomlTable, key: str, default: float) -> float:
    value = table.data.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:  # false for NaN too
        raise table.error(key, f"{quoted(value)} is not a finite number above 0")
    return float(value)
