"""Where a run took place: versions, device, date and command, for whoever reads its report."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from csa_dispatch import __version__
from csa_dispatch.registry import backends

_PREFIXES = ("CSA_DISPATCH_", "TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that change what runs."""


def environment(device: str, names: Sequence[str]) -> dict[str, object]:
    """The environment of this process as JSON-ready data."""
    found: dict[str, object] = {
        "csa_dispatch": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "device": device,
        "device_name": _device_name(device),
        "threads": torch.get_num_threads(),
        "backends": {name: _version(name) for name in names},
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    return found


def _version(name: str) -> str:
    availability = backends()[name].availability
    if availability.reason is not None:
        return str(availability.reason)
    return availability.version or "built in"


def _device_name(device: str) -> str:
    if device != "cuda":
        return f"{platform.machine()}, {os.cpu_count()} cores"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, sm_{properties.major}{properties.minor}, CUDA {torch.version.cuda}"
