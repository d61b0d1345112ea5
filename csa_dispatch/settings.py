"""Settings from the environment: every CSA_DISPATCH_* variable, checked and read once."""

from __future__ import annotations

import difflib
import os
import threading
import warnings
from typing import NamedTuple

from .validation import fail

PREFIX = "CSA_DISPATCH_"
VARIABLES = {
    "CSA_DISPATCH_BACKEND": "backend name to force, forward and backward",
    "CSA_DISPATCH_BACKWARD_BACKEND": "backend name to force for the backward alone",
    "CSA_DISPATCH_POLICY": "path of a routing policy (TOML)",
    "CSA_DISPATCH_FALLBACK": "error, warn or allow when a faster installed backend is passed over",
    "CSA_DISPATCH_CHECK_VALUES": "1 to check offsets and index ranges on the host (debugging)",
}
FALLBACK_MODES = ("error", "warn", "allow")


class Settings(NamedTuple):
    """What the environment asks for; see ``VARIABLES``."""

    backend: str | None
    backward_backend: str | None
    policy: str | None
    fallback: str
    check_values: bool


class EnvironmentWarning(UserWarning):
    """A CSA_DISPATCH_* variable that nothing reads."""


def _read() -> Settings:
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(VARIABLES)}"
            warnings.warn(
                f"environment variable {name} is not read by csa-dispatch; {hint}",
                EnvironmentWarning,
                stacklevel=4,
            )
    fallback = os.environ.get("CSA_DISPATCH_FALLBACK") or "warn"
    if fallback not in FALLBACK_MODES:
        required = f"one of {', '.join(FALLBACK_MODES)}"
        fail("CSA_DISPATCH_FALLBACK", repr(fallback), required, "Unset it for warn.")
    check = os.environ.get("CSA_DISPATCH_CHECK_VALUES") or "0"
    if check not in ("0", "1"):
        fail("CSA_DISPATCH_CHECK_VALUES", repr(check), "0 or 1", "Unset it for 0.")
    return Settings(
        backend=os.environ.get("CSA_DISPATCH_BACKEND") or None,
        backward_backend=os.environ.get("CSA_DISPATCH_BACKWARD_BACKEND") or None,
        policy=os.environ.get("CSA_DISPATCH_POLICY") or None,
        fallback=fallback,
        check_values=check == "1",
    )


_lock = threading.Lock()
_current: Settings | None = None


def settings() -> Settings:
    """The process's settings, read from the environment on first use.

    Raises:
        ValueError: a variable with a value outside its set.
    """
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = _read()
    return _current


def reload_settings() -> Settings:
    """Read the environment again, for a process that changes its own variables."""
    global _current
    with _lock:
        _current = _read()
    from .generation import advance

    advance()
    return _current
