"""Registry: every backend that is installed or registered, and why the others are not here.

In-tree backends come through the same entry-point group as anyone's. A plug-in that fails to
import, or that is not a backend, becomes a row with its reason, never an import error.
"""

from __future__ import annotations

import difflib
import threading
from importlib import metadata
from typing import NamedTuple

from .backend import ENTRY_POINT_GROUP, Availability, Backend
from .capabilities import Capabilities
from .generation import advance
from .reasons import Reason
from .validation import fail
from .wording import a_kind, quoted, told


class Row(NamedTuple):
    """One backend the process knows.

    Attributes:
        name: what forces it.
        backend: the plug-in, or None when it could not be loaded.
        availability: its version, or why it cannot run here.
        origin: the entry point's value, or "register_backend".
    """

    name: str
    backend: Backend | None
    availability: Availability
    origin: str

    @property
    def available(self) -> bool:
        return self.backend is not None and self.availability.reason is None


_lock = threading.RLock()
_rows: dict[str, Row] | None = None


def _broken(name: str, origin: str, actual: str, remedy: str) -> Row:
    reason = Reason("availability", actual, "a loadable backend plug-in", remedy)
    return Row(name, None, Availability("", reason), origin)


def _describe(error: BaseException) -> str:
    return f"broken ({type(error).__name__}: {' '.join(str(error).split())})"


def _fault(backend: Backend) -> tuple[str, str, str, type[Exception]] | None:
    """The first attribute nobody could use: its name, what it is, what it must be, the error."""
    name = getattr(backend, "name", None)
    if not isinstance(name, str):
        return "name", repr(name), "a string", TypeError
    # Policies write "forward+backward".
    if not name or "+" in name or name != name.strip():
        return "name", repr(name), "of a character or more, no '+' or outer space", ValueError
    for side, wanted in (
        ("forward_capabilities", "a Capabilities"),
        ("backward_capabilities", "a Capabilities, or None without a backward"),
    ):
        claims = getattr(backend, side, None)
        absent = claims is None and side == "backward_capabilities"
        if not isinstance(claims, Capabilities) and not absent:
            found = a_kind(claims)
            return side, found, wanted, TypeError
    return None


def _check(name: str, value: object, origin: str) -> Row:
    """A row for a loaded plug-in object, probed."""
    if not isinstance(value, Backend):
        actual = f"{a_kind(value)}, not a csa_dispatch.Backend"
        return _broken(name, origin, actual, "Point the entry point at a Backend instance.")
    for attribute in ("name", "forward_capabilities"):
        if not hasattr(value, attribute):
            return _broken(name, origin, f"without {attribute}", "Set it on the class.")
    if value.name != name:
        return _broken(name, origin, f"called {value.name!r}", "Give both the same name.")
    if fault := _fault(value):
        attribute, found, wanted, _ = fault
        return _broken(name, origin, f"with {attribute} {found}", f"It must be {wanted}.")
    try:
        availability = value.probe()
    except Exception as error:
        return _broken(name, origin, _describe(error), "Its probe() must not raise.")
    return Row(name, value, availability, origin)


def _load(entry_point: metadata.EntryPoint) -> Row:
    try:
        value = entry_point.load()
    except (Exception, SystemExit) as error:
        remedy = f"Repair or uninstall the package that provides {entry_point.value}."
        return _broken(entry_point.name, entry_point.value, _describe(error), remedy)
    return _check(entry_point.name, value, entry_point.value)


def _discover() -> dict[str, Row]:
    found: dict[str, Row] = {}
    points = list(metadata.entry_points(group=ENTRY_POINT_GROUP))
    # Ours first, so that a stranger's package cannot take an in-tree name.
    points.sort(key=lambda point: (not point.value.startswith("csa_backend_"), point.name))
    for point in points:
        if point.name in found:
            if found[point.name].origin != point.value:
                name = f"{point.name} ({point.value})"
                found[name] = _broken(name, point.value, "a name already taken", "Rename it.")
            continue
        found[point.name] = _load(point)
    return found


def backends() -> dict[str, Row]:
    """Every known backend by name, loaded and probed on first use."""
    global _rows
    if _rows is None:
        with _lock:
            if _rows is None:
                _rows = _discover()
    return _rows


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Add a backend at run time, as an entry point would.

    Raises:
        TypeError: ``backend`` is not a ``Backend`` instance, or its name or capabilities are of
            another type than ``Backend`` says.
        ValueError: its name is taken and ``replace`` is False, or it is empty, holds a "+",
            or begins or ends with white space.
    """
    global _rows
    if not isinstance(backend, Backend):
        actual, remedy = a_kind(backend), "Pass an instance of your class."
        fail("backend", actual, "a Backend instance", remedy, TypeError)
    if fault := _fault(backend):
        attribute, found, wanted, error = fault
        fail(f"backend.{attribute}", found, wanted, "Set it on the backend's class.", error)
    with _lock:
        rows = dict(backends())
        if backend.name in rows and not replace:
            raise ValueError(
                f"backend name {backend.name!r} is already registered "
                f"({rows[backend.name].origin}); rename yours or pass replace=True."
            )
        rows[backend.name] = _check(backend.name, backend, "register_backend")
        _rows = rows
    advance()


def unregister_backend(name: str) -> None:
    """Forget a backend; an entry point's comes back with the next process.

    Raises:
        ValueError: no such backend.
    """
    global _rows
    known_backend(name)
    with _lock:
        _rows = {key: row for key, row in backends().items() if key != name}
    advance()


def known_backend(name: str, source: str = "backend") -> Row:
    """The row called ``name``.

    Raises:
        TypeError: the name is not a string.
        ValueError: it is unknown; the message names what set it and the known ones.
    """
    if not isinstance(name, str):
        actual, remedy = told(name), "csa-dispatch backends lists them."
        fail(source, actual, "a backend's name or None", remedy, TypeError)
    row = backends().get(name)
    if row is None:
        fail(
            source, quoted(name), f"one of {', '.join(backends()) or 'none'}", _hint(name, source)
        )
    return row


_BACKWARD = {
    "use_backend": "backward=",
    "backend": "backward_backend=",
    "CSA_DISPATCH_BACKEND": "CSA_DISPATCH_BACKWARD_BACKEND=",
}
"""What names a backward alone, beside each source that names both directions."""


def _hint(name: str, source: str) -> str:
    """What to do about a name that no backend has."""
    forward, _, backward = name.partition("+")
    if backward and source in _BACKWARD and forward in backends() and backward in backends():
        # Policies write it so; here each direction has a name of its own.
        value = backward if source.isupper() else repr(backward)
        return f"Name {forward} alone, and pass {_BACKWARD[source]}{value} beside it."
    close = difflib.get_close_matches(name, backends(), n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return "csa-dispatch backends lists them; install the package of one that it lacks."
