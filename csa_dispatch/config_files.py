"""Configuration files: a path of the caller's, or the name of one that is shipped."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

from .wording import shorten

DEEPEST = 100
"""Arrays and tables within each other that a file may have."""


def load_config(path: str | Path, folder: str) -> dict[str, Any]:
    """Parse ``path``, or else the shipped file of that name in ``configs/<folder>``.

    Raises:
        ValueError: neither exists, or it cannot be read, or it is not TOML; in one line.
    """
    try:
        text = _read(Path(path), folder)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return parse_toml(text, path)


def parse_toml(text: str, path: str | Path) -> dict[str, Any]:
    """Parse the text of the file ``path``.

    Raises:
        ValueError: it is not TOML, or nests deeper than ``DEEPEST``; in one line.
    """
    try:
        data = tomllib.loads(text)
        _check_depth(data)
    except RecursionError:
        nested = f"arrays or tables are nested more than {DEEPEST} deep; flatten them"
        raise ValueError(f"{path}: cannot be read: {nested}") from None
    except ValueError as error:  # TOMLDecodeError, or an int of more digits than Python reads
        raise ValueError(f"{path}: not valid TOML: {shorten(str(error))}") from None
    return data


def _check_depth(data: dict[str, Any]) -> None:
    """Hold parsed data to ``DEEPEST``: dotted keys nest further than Python can show a value.

    Raises:
        RecursionError: as the parser does at its own limit.
    """
    level: list[dict[str, Any] | list[Any]] = [data]  # all arrays and tables that lie as deep
    for _ in range(DEEPEST):
        held = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in held for item in items if isinstance(item, dict | list)]
    if level:
        raise RecursionError


def _read(place: Path, folder: str) -> str:
    if place.is_file():
        return place.read_text(encoding="utf-8")
    shipped = resources.files("csa_dispatch_configs") / folder / place.name
    if shipped.is_file() and place.suffix == ".toml":
        return shipped.read_text(encoding="utf-8")
    raise ValueError(f"{place}: no such file; shipped: {', '.join(shipped_configs(folder))}")


def shipped_configs(folder: str) -> list[str]:
    """Names of the TOML files in ``configs/<folder>``."""
    place = resources.files("csa_dispatch_configs") / folder
    return sorted(item.name for item in place.iterdir() if item.name.endswith(".toml"))
