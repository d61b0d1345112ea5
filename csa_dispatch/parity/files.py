"""Writing report files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from csa_dispatch.wording import quoted


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path``: a reader sees the old file or the new, whole.

    Missing folders are made. What is no regular file (a device, a pipe, a link) is written to
    rather than replaced.

    Raises:
        OSError: the place cannot be written to.
    """
    place = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if _is_special(place):
        place.write_bytes(data)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # as open() would; mkstemp allows the owner alone
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def check_writable(*paths: str | None) -> None:
    """Find out before the work whether its reports can be written; None is no file.

    Missing folders are made.

    Raises:
        OSError: naming the first place that cannot be written to.
    """
    for path in paths:
        if path is None:
            continue
        place = Path(path)
        if _is_special(place):
            place.open("ab").close()
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place.parent).close()


def check_places(places: Mapping[str, str | None]) -> None:
    """``check_writable`` for a command's options, each of which needs a file of its own.

    Raises:
        ValueError: naming an option whose place is no file's name, or another option's.
        OSError: naming the first place that cannot be written to.
    """
    taken: dict[str, str] = {}
    for option, path in places.items():
        if path is None:
            continue
        if path == "-":
            remedy = "Pass the name of one."
            raise ValueError(f"{option} is '-'; it must be a file. {remedy}")
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            required = f"it must be another file than {other}'s"
            raise ValueError(f"{option} is {quoted(path)}; {required}. Pass two names.")
    check_writable(*places.values())


def _is_special(place: Path) -> bool:
    return place.is_symlink() or (place.exists() and not place.is_file())
