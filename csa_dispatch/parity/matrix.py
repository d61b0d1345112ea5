"""Matrices: TOML files that say which cases a parity run holds.

A matrix file::

    name = "ci"
    summary = "what a change must pass on a CPU"
    device = "cpu"                       # default of --device
    backends = ["eager", "triton"]       # default of --backend; left out: every known one

    [limits.triton]                      # cases left out for a backend, and why
    environment = "TRITON_INTERPRET=1"   # only then
    max_blocks = 40                      # batch * tokens * ceil(heads / heads_a_block)
    heads_a_block = 16
    why = "the interpreter takes 30 ms a block"

    [[group]]
    name = "pairs"
    source = "axes"                      # or another of those below
    layouts = ["BHSD", "THD"]            # taken in turn
    axes = { tokens = [9], heads = [1, 3, 16] }

Sources: ``axes`` covers every pair (``strength`` 1: every value) of axis values; ``claims`` does
so for what each backend's Capabilities claim; ``list`` takes each table of ``cases`` over
``base``; ``field`` takes the field cases in each of ``dtypes``, ``indexer`` and ``compressor``
those of ``lightning_indexer`` and ``compress_kv``, on the backends that have one; ``boundaries``
steps just outside each claim.
``crossed = true`` pairs each backend's forward with every other one's backward instead of its
own.
``reference = "chunked"`` compares with the vectorised float64 reference, for calls too large for
the oracle, which vouches for it on ``sample_rows`` query rows of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csa_dispatch.call import Kind
from csa_dispatch.config_files import load_config, shipped_configs
from csa_dispatch.layouts import LAYOUTS
from csa_dispatch.testing import Case
from csa_dispatch.testing.field_cases import DTYPES
from csa_dispatch.toml_table import MatrixError, TomlTable

OPERATIONS = {"indexer": "lightning_indexer", "compressor": "compress_kv"}
"""Sources of an operation beside attention, and which."""

SOURCES = ("axes", "claims", "list", "field", *OPERATIONS, "boundaries")
DEVICES = ("cpu", "cuda")
REFERENCES = ("oracle", "chunked")

_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "index_dtype": ("int32", "int64", "none"),
    "sink": ("float32", "same", "none"),
    "documents": ("none", "cu_seqlens", "doc_ids"),
}
_DEFAULTS = {item.name: item.default for item in dataclasses.fields(Case)}
GRADIENT_LETTERS = "qlps"
"""query, local_kv, sparse_kv (the pool) and attention_sink, as in a case's name."""


@dataclass(frozen=True)
class Limit:
    """Cases left out for one backend because they would take too long.

    Attributes:
        environment: ``"NAME=value"``: only when that variable has that value; empty: always.
        max_blocks: most ``batch * tokens * ceil(heads / heads_a_block)`` that still runs.
        heads_a_block: query heads that one kernel program handles.
        why: for the report.
    """

    max_blocks: int
    environment: str = ""
    heads_a_block: int = 1
    why: str = ""


@dataclass(frozen=True)
class Group:
    """One source of cases; see the module's text for the meaning of its fields."""

    name: str
    source: str
    summary: str = ""
    device: str = ""
    backends: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("BHSD",)
    crossed: bool = False
    strength: int = 2
    seed: int = 0
    axes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    reference: str = "oracle"
    sample_rows: int = 16


@dataclass(frozen=True)
class Matrix:
    """A parsed matrix file."""

    name: str
    groups: tuple[Group, ...]
    path: str = ""
    summary: str = ""
    device: str = "cpu"
    backends: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)


def load_matrix(path: str | Path) -> Matrix:
    """Read a matrix file; a path that does not exist is also looked for among the shipped ones.

    Raises:
        MatrixError: no such file, not TOML, or a malformed key; one line that names both.
    """
    try:
        data = load_config(path, "parity")
    except ValueError as error:
        raise MatrixError(str(error)) from None
    return parse_matrix(data, str(path))


def shipped_matrices() -> list[str]:
    """Names of the matrix files in ``configs/parity``."""
    return shipped_configs("parity")


def parse_matrix(data: Mapping[str, Any], path: str) -> Matrix:
    """A Matrix from parsed TOML; ``path`` names it in errors.

    Raises:
        MatrixError: an unknown or malformed key.
    """
    top = TomlTable(data, path, "")
    top.only("name", "summary", "device", "backends", "limits", "group")
    groups = data.get("group")
    if not isinstance(groups, list) or not groups:
        raise top.error("group", "a matrix has at least one [[group]] table")
    limits = top.table("limits")
    matrix = Matrix(
        name=top.text("name"),
        groups=tuple(
            _group(TomlTable(group, path, f"group[{position}]."))
            for position, group in enumerate(groups)
        ),
        path=path,
        summary=top.text("summary", ""),
        device=top.word("device", DEVICES, "cpu"),
        backends=top.texts("backends"),
        limits={name: _limit(limits.table(name)) for name in limits.data},
    )
    names = [group.name for group in matrix.groups]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise top.error(f"group[{position}].name", f"{name!r} is the name of two groups")
    return matrix


def _limit(table: TomlTable) -> Limit:
    table.only("environment", "max_blocks", "heads_a_block", "why")
    environment = table.text("environment", "")
    if environment and "=" not in environment:
        raise table.error("environment", f"{environment!r} is not of the form NAME=value")
    return Limit(
        table.count("max_blocks"),
        environment,
        table.count("heads_a_block", 1),
        table.text("why", ""),
    )


def _group(table: TomlTable) -> Group:
    table.only(*(item.name for item in dataclasses.fields(Group)), "base")
    source = table.word("source", SOURCES)
    if source != "list":
        table.never("base", "cases", why='only a group with source = "list" has it')
    if source not in ("axes", "claims"):
        table.never("axes", "strength", why='only source = "axes" or "claims" has it')
    if source not in ("field", *OPERATIONS):
        table.never("dtypes", why='only source = "field", "indexer" or "compressor" has it')
    axes = table.table("axes")
    layouts = table.texts("layouts") or ("BHSD",)
    for layout in layouts:
        if layout not in LAYOUTS:
            raise table.error("layouts", f"{layout!r} is not one of {', '.join(LAYOUTS)}")
    strength = table.count("strength", 2)
    if strength not in (1, 2):
        raise table.error("strength", f"{strength} is not 1 (each value) or 2 (each pair)")
    return Group(
        name=table.text("name"),
        source=source,
        summary=table.text("summary", ""),
        device=table.word("device", DEVICES, ""),
        backends=table.texts("backends"),
        layouts=layouts,
        crossed=table.flag("crossed"),
        strength=strength,
        seed=table.count("seed", 0),
        axes={name: _axis(axes, name, values) for name, values in axes.data.items()},
        cases=_cases(table),
        dtypes=_dtypes(table),
        reference=table.word("reference", REFERENCES, "oracle"),
        sample_rows=table.count("sample_rows", 16),
    )


def _dtypes(table: TomlTable) -> tuple[str, ...]:
    names = table.texts("dtypes") or DTYPES
    for name in names:
        if name not in _WORDS["dtype"]:
            raise table.error("dtypes", f"{name!r} is not one of {', '.join(_WORDS['dtype'])}")
    return names


def _cases(table: TomlTable) -> tuple[Case, ...]:
    if table.data.get("source") != "list":
        return ()
    base = _fields(table.table("base"))
    listed = table.data.get("cases")
    if not isinstance(listed, list) or not listed:
        raise table.error("cases", 'source = "list" needs a list of tables')
    found = []
    for position, item in enumerate(listed):
        place = TomlTable(item, table.path, f"{table.where}cases[{position}].")
        merged: dict[str, Any] = {**base, **_fields(place)}
        try:
            found.append(Case(**merged))
        except ValueError as error:
            raise table.error(f"cases[{position}]", str(error)) from None
    return tuple(found)


def _fields(table: TomlTable) -> dict[str, object]:
    return {name: _field(table, name, value) for name, value in table.data.items()}


def _axis(table: TomlTable, name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, list) or not values:
        raise table.error(name, "an axis is a list of values")
    return tuple(_field(table, name, value) for value in values)


def _field(table: TomlTable, name: str, value: Any) -> object:
    """One value of a Case field, checked as far as that is possible without the others."""
    if name not in _DEFAULTS:
        raise table.error(name, f"is not a field of a case; known: {', '.join(_DEFAULTS)}")
    if name == "needs_grad":
        if not isinstance(value, str) or set(value) - set(GRADIENT_LETTERS):
            letters = f"a subset of {GRADIENT_LETTERS!r} (query, local_kv, sparse_kv, sink)"
            raise table.error(name, f"{value!r} is not {letters}")
        return tuple(letter in value for letter in GRADIENT_LETTERS)
    if name == "kind":
        try:
            return Kind(value)
        except ValueError:
            kinds = ", ".join(kind.value for kind in Kind)
            raise table.error(name, f"{value!r} is not one of {kinds}") from None
    if name in _WORDS and value not in _WORDS[name]:
        raise table.error(name, f"{value!r} is not one of {', '.join(_WORDS[name])}")
    default = _DEFAULTS[name]
    wanted = (int, float) if name == "scale" else type(default)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        kind = "number" if name == "scale" else type(default).__name__
        raise table.error(name, f"{value!r} is not a {kind}")
    if wanted is int and value < 0:
        raise table.error(name, f"{value!r} is negative")
    if name in ("content", "memory"):
        try:
            Case(**{name: value})  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise table.error(name, str(error)) from None
    return value
