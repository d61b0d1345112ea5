"""Text hygiene of the files given, or of all tracked files: exit 1 and say what is wrong.

Run: python scripts/hygiene.py [FILE ...]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_BYTES = 512 * 1024
CONFLICTS = (b"<<<<<<< ", b">>>>>>> ")


def problems(path: Path) -> list[str]:
    """What is wrong with one file; binary files are only checked for size."""
    data = path.read_bytes()
    found: list[str] = []
    if len(data) > MAX_BYTES:
        found.append(f"{path}: {len(data)} bytes; at most {MAX_BYTES}")
    if b"\0" in data:
        return found
    if data and not data.endswith(b"\n"):
        found.append(f"{path}: no newline at its end")
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.endswith((b" ", b"\t", b"\r")):
            found.append(f"{path}:{number}: whitespace at the end of the line")
        if line.startswith(CONFLICTS):
            found.append(f"{path}:{number}: merge conflict marker")
    return found


def main() -> int:
    names = sys.argv[1:]
    if not names:
        listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True)
        names = listed.stdout.decode().split("\0")[:-1]
    found = [problem for name in names if Path(name).is_file() for problem in problems(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
