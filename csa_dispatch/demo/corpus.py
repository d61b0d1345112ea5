"""Real text that every machine has: the sources of the running interpreter's standard library."""

from __future__ import annotations

import hashlib
import math
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SKIPPED = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings")
)
"""Directories left out: other people's packages, test data, and code-page tables."""

HELD_OUT_SHARE = 10
"""One file in this many is held out, by a checksum of its path."""

MINIMUM_BYTES = 1 << 20


class CorpusError(RuntimeError):
    """The interpreter's standard library is not there as source files."""


class Split(NamedTuple):
    """Whole files, one after the other.

    Attributes:
        text: uint8 ``[N]``, the files' bytes.
        offsets: int64 ``[files + 1]``, where each file starts; the last is ``N``.
    """

    text: Tensor
    offsets: Tensor

    @property
    def files(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.text.shape[0]


class Corpus(NamedTuple):
    """Training and held-out files of one standard library.

    Attributes:
        root: the directory they were read from.
        train, held_out: no file is in both.
        digest: SHA-256 over paths and contents: the same digest is the same text.
    """

    root: Path
    train: Split
    held_out: Split
    digest: str


def standard_library() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Every ``*.py`` under ``root`` but ``SKIPPED``, as (posix path, path), in path order."""
    found = (
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if SKIPPED.isdisjoint(path.relative_to(root).parts)
    )
    return iter(sorted(found))


def is_held_out(name: str) -> bool:
    """Whether the file of this relative path is held out; adding files moves no other."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library under ``root`` (the running interpreter's when None).

    Raises:
        CorpusError: fewer than ``MINIMUM_BYTES`` of sources are there.
    """
    root = standard_library() if root is None else root
    digest = hashlib.sha256()
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name, path in source_files(root):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
        (held_out if is_held_out(name) else train).append(content)
    size = sum(map(len, train)) + sum(map(len, held_out))
    if size < MINIMUM_BYTES:
        raise CorpusError(
            f"{root} holds {size} bytes of Python sources; the demo needs {MINIMUM_BYTES}. "
            "Run it with an interpreter whose standard library is installed as .py files."
        )
    return Corpus(root, _joined(train), _joined(held_out), digest.hexdigest())


def _joined(files: list[bytes]) -> Split:
    lengths = torch.tensor([0, *map(len, files)], dtype=torch.int64)
    text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
    return Split(text, lengths.cumsum(0))


def draw_spans(split: Split, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``count`` spans of ``length`` bytes, int64 ``[count, length]``, none across two files.

    Every span is equally likely, so that a long file gives more of them than a short one.
    """
    room = (split.offsets.diff() - length + 1).clamp(min=0)
    ends = room.cumsum(0)
    if ends[-1] == 0:
        raise ValueError(f"no file holds {length} bytes")
    pick = torch.randint(int(ends[-1]), (count,), generator=generator)
    file = torch.searchsorted(ends, pick, right=True)
    start = split.offsets[file] + pick - (ends[file] - room[file])
    return split.text[start[:, None] + torch.arange(length)].long()


class Baselines(NamedTuple):
    """What simple counts reach on the held-out spans, in bits per byte."""

    order0: float
    order1: float


def baselines(split: Split, spans: Tensor) -> Baselines:
    """Cross-entropy of ``spans[:, 1:]`` under byte counts of ``split``.

    Order 0 knows how often each byte occurs, order 1 how often it follows the byte before it.
    Counts start at 1/256 (order 0) and at the order-0 probability (order 1), so that no byte is
    impossible.
    """
    text = split.text.long()
    counts = torch.bincount(text, minlength=256).double()
    zero = (counts + 1 / 256) / (counts.sum() + 1)
    pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=65536).double().view(256, 256)
    one = (pairs + zero) / (pairs.sum(1, keepdim=True) + 1)
    before, after = spans[:, :-1], spans[:, 1:]
    bits = -1 / math.log(2)
    return Baselines(
        float(zero.log()[after].mean() * bits), float(one.log()[before, after].mean() * bits)
    )
