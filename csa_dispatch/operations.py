"""Every operation that is dispatched, and the class that describes its calls."""

from __future__ import annotations

from .call_spec import CallSpec

SPECS: dict[str, type[CallSpec]] = {"attention": CallSpec}
