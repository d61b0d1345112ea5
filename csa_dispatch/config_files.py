"""Configuration files: a path of the caller's, or the name of one that is shipped."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def read_config(path: str | Path, folder: str) -> str:
    """The text of ``path``, or else of the shipped file of that name in ``configs/<folder>``.

    Raises:
        ValueError: neither exists, or it cannot be read; the message names the shipped ones.
    """
    place = Path(path)
    try:
        if place.is_file():
            return place.read_text(encoding="utf-8")
        shipped = resources.files("csa_dispatch_configs") / folder / place.name
        if shipped.is_file() and place.suffix == ".toml":
            return shipped.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    raise ValueError(f"{path}: no such file; shipped: {', '.join(shipped_configs(folder))}")


def shipped_configs(folder: str) -> list[str]:
    """Names of the TOML files in ``configs/<folder>``."""
    place = resources.files("csa_dispatch_configs") / folder
    return sorted(item.name for item in place.iterdir() if item.name.endswith(".toml"))
