"""What torch.compile is told about functions it should not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_when_traced(function: Function) -> Function:
    """Have dynamo run ``function`` while it traces, and keep the result in the graph.

    This is ``torch.compiler.assume_constant_result`` without its import of all of dynamo, which
    would add seconds to ``import csa_dispatch``.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
