"""What routing needs of any call's description, whatever the operation."""

from __future__ import annotations

from typing import Any, Protocol


class Spec(Protocol):
    """A call without its data: a NamedTuple whose fields Claims and policies bound by name.

    ``operation`` says which operation the call is of, e.g. ``"attention"``.
    """

    @property
    def operation(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def device_type(self) -> str: ...

    @property
    def capability(self) -> int | None: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def differentiable(self) -> bool: ...

    def _asdict(self) -> dict[str, Any]: ...
