"""One counter that every cached decision depends on: it moves when routing's inputs change."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_generation = 0


def advance() -> None:
    """Invalidate cached decisions: a backend was registered or the settings were re-read."""
    global _generation
    with _lock:
        _generation += 1


def current() -> int:
    return _generation
