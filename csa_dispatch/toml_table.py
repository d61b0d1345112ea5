"""Reading keys of a TOML table, with errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from .wording import quoted, shorten

MOST = 2**63 - 1
"""The largest whole number of TOML, which the parser itself does not hold files to."""


class MatrixError(ValueError):
    """A malformed matrix; the message names the file and the key."""


class TomlTable:
    """One table of a matrix file.

    Args:
        data: the table.
        path: the file's name.
        where: the table's own key with a trailing dot, or empty for the top.

    Raises:
        MatrixError: ``data`` is not a table.
    """

    def __init__(self, data: object, path: str, where: str) -> None:
        self.path, self.where = path, where
        self.data: Mapping[str, Any] = {}
        if not isinstance(data, Mapping):
            self._fail(where.rstrip("."), f"{quoted(data)} is not a table")
        self.data = data

    def error(self, key: str, text: str) -> MatrixError:
        """The error to raise about ``key`` of this table."""
        return MatrixError(f"{self.path}: {self.where}{_key(key)}: {text}")

    def _fail(self, key: str, text: str) -> NoReturn:
        raise MatrixError(f"{self.path}: {key}: {text}")

    def only(self, *keys: str) -> None:
        """Refuse every key but these."""
        for key in self.data:
            if key not in keys:
                raise self.error(key, f"is not a known key; known: {', '.join(keys)}")

    def never(self, *keys: str, why: str) -> None:
        """Refuse these keys."""
        for key in keys:
            if key in self.data:
                raise self.error(key, why)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required without a default."""
        value = self.data.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str):
            raise self.error(key, f"{quoted(value)} is not a string")
        return value

    def name(self, key: str) -> str:
        """A string to show in tables: printable, and not empty; required."""
        value = self.text(key)
        if not value.isprintable() or not value.strip():
            required = "one line of printable characters, not empty"
            raise self.error(key, f"is {quoted(value)}; it must be {required}")
        return value

    def word(self, key: str, words: tuple[str, ...], default: str | None = None) -> str:
        """One of ``words``; required without a default."""
        value = self.text(key, default)
        if value not in words and value != default:
            raise self.error(key, f"{quoted(value)} is not one of {', '.join(words)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty when left out."""
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"{quoted(value)} is not a list of strings")
        return tuple(value)

    def count(
        self, key: str, default: int | None = None, *, least: int = 0, most: int = MOST
    ) -> int:
        """A whole number from ``least`` to ``most``; required without a default."""
        value = self.data.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            required = f"a whole number from {least} to {most}"
            raise self.error(key, f"is {quoted(value)}; it must be {required}")
        return value

    def flag(self, key: str) -> bool:
        """true or false; false when left out."""
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"{quoted(value)} is not true or false")
        return value

    def table(self, key: str) -> TomlTable:
        """A table of this one, empty when left out."""
        return TomlTable(self.data.get(key, {}), self.path, f"{self.where}{_key(key)}.")


def _key(key: str) -> str:
    """A key as messages show it: it may be as long as the file, and of several lines."""
    return shorten(key) if key.isprintable() else quoted(key)
