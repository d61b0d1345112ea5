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


def load_config(path: str | Path, folder: str) -> dict[str, Any]:
    """Parse ``path``, or else the shipped file of that name in ``configs/<folder>``.

    Raises:
        ValueError: neither exists, or it cannot be read, or it is not TOML; in one line.
    """
    try:
        return tomllib.loads(_read(Path(path), folder))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None


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
