"""Run the examples of Markdown pages and compare what they print with what the page says.

Run: python scripts/run_examples.py PAGE [PAGE ...]

Each page is one session: its ```python blocks run in order in one namespace and a ```console
block's ``$`` lines run in a shell, all in a scratch folder. A ```text block right after a python
block is what that block prints; in a console block, the lines after a command are what it
prints. ``...`` there stands for anything, and runs of white space count as one. A block after
the line ``<!-- not run: why -->`` is left out.
"""

from __future__ import annotations

import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(\w*)\s*$")
LEFT_OUT = re.compile(r"^<!-- not run: .+ -->$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """One fenced block: its language, the 0-based line of its first line, its lines."""

    language: str
    line: int
    lines: list[str]
    left_out: bool

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order; prose between two of them is a Block of "prose"."""
    language, start, lines, left_out = "", 0, [], False
    for number, line in enumerate(text.splitlines()):
        fence = FENCE.match(line)
        if language and line == "```":
            yield Block(language, start, lines, left_out)
            language, left_out = "", False
        elif language:
            lines.append(line)
        elif fence and fence.group(1):
            language, start, lines = fence.group(1), number + 1, []
        elif line.strip():
            left_out = bool(LEFT_OUT.match(line))
            yield Block("prose", number, [line], False)


class Failure(Exception):
    """An example that raised, failed or printed something else."""


def compare(where: str, wanted: str, got: str) -> None:
    """Raise Failure unless ``got`` is what the page says."""
    if not doctest.OutputChecker().check_output(wanted, got, FLAGS):
        raise Failure(f"{where}: the page says\n{wanted}\nbut it printed\n{got}")


def run_python(page: Path, block: Block, namespace: dict[str, object]) -> str:
    """Run one python block; its standard output."""
    code = "\n" * block.line + block.text
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
    except BaseException:
        raise Failure(f"{page}:{block.line}:\n{traceback.format_exc()}") from None
    return printed.getvalue()


def run_console(page: Path, block: Block) -> None:
    """Run the commands of one console block, with this interpreter's scripts on PATH."""
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"]}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1"}
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        done = subprocess.run(
            command, shell=True, env=environment, capture_output=True, text=True, check=False
        )
        where = f"{page}:{block.line}: $ {command}"
        if done.returncode:
            raise Failure(f"{where}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        if wanted.strip():
            compare(where, wanted, done.stdout)


def run_page(page: Path) -> int:
    """Run a page's examples; how many ran.

    Raises:
        Failure: the first one that does not do what the page says.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    count, printed = 0, None
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language == "text" and printed is not None:
            compare(f"{page}:{block.line}", block.text, printed)
        printed = None
        if block.left_out:
            continue
        if block.language == "python":
            printed = run_python(page, block, namespace)
            count += 1
        elif block.language == "console":
            run_console(page, block)
            count += 1
    return count


def main() -> int:
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    for page in pages:
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            try:
                count = run_page(page)
            except Failure as failure:
                print(failure)
                return 1
            finally:
                os.chdir(page.parent)
        print(f"{page.name}: {count} examples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
