"""How messages show a value: bounded, and never failing on the value that is at fault."""

from __future__ import annotations

import torch
from torch import Tensor

SHOWN = 120
"""Characters of a value that a message shows; a list may have megabytes of them."""

_INT_BITS = 2000
"""Python refuses to write ints out that are longer than a limit, which is 2126 bits or more."""


def shorten(text: str, most: int = SHOWN) -> str:
    """``text``, or its beginning and an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def as_text(value: object) -> str:
    """``str(value)``, bounded, in a form that dynamo follows when ``value`` is symbolic."""
    if torch.compiler.is_compiling():
        return "{}".format(value)  # noqa: UP032
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        return f"an int of {value.bit_length()} bits"
    return shorten(str(value))


def told(value: object) -> str:
    """A value of a wrong type, with its type, as messages show it."""
    kind = type(value).__name__
    return f"{quoted(value, SHOWN - len(kind) - 3)} ({kind})"


def quoted(value: object, most: int = SHOWN) -> str:
    """``repr(value)`` on one line, bounded; while dynamo traces, what it follows."""
    if torch.compiler.is_compiling():
        return repr(value) if isinstance(value, str) else as_text(value)
    try:
        text = repr(value)
    except ValueError:  # a long int, or a container of some
        return "too long to write out"
    return shorten(" ".join(text.split()), most)


def a_kind(value: object) -> str:
    """The type of ``value`` with its article: "a list", "an int"; "None" for None."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def number_remedy(name: str, value: object, cast: type[int] | type[float]) -> str:
    """How to make ``value``, of a wrong type, the number that ``cast`` gives."""
    if isinstance(value, Tensor):
        single = value.numel() == 1 and not value.is_meta and not value.is_complex()
        if single and cast is float and value.dtype != torch.bool:
            return f"Pass {name}.item()."
        return _plain(name, single, cast)
    try:
        cast(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return _plain(name, False, cast)
    return f"Pass {cast.__name__}({name})."


def _plain(name: str, converts: bool, cast: type[int] | type[float]) -> str:
    if converts:
        return f"Pass {cast.__name__}({name})."
    return "Pass one whole number." if cast is int else "Pass one number, as 0.125."


def cast_remedy(kv_indices: Tensor) -> str:
    """For kv_indices of a wrong dtype."""
    if kv_indices.dtype == torch.bool:  # cast, a mask would select entries 0 and 1 alone
        how = "topk of the scores, or nonzero() of each token's mask filled up with -1"
        return f"Pass entries' numbers: {how}."
    return "Cast it."
