"""How much memory a backward may take beyond its results."""

from __future__ import annotations

LIMIT_BYTES = 496 << 20
"""With delta; the rest of 512 MiB is for plans and other small tables."""


def room(most: int, besides: int, batch: int, heads: int, tokens: int) -> int:
    """Bytes for a chunk's buffers: ``most``, or what ``besides`` and delta leave of the limit.

    At least a quarter of ``most``: chunks of a few tokens would take forever, and a delta that
    leaves less (of 90 million rows of 4 bytes) is past helping.
    """
    delta = 4 * batch * heads * tokens
    return min(most, max(LIMIT_BYTES - besides - delta, most // 4))
