"""Kernels' keys in Triton's cache are the same in every process, whatever it compiled before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import importlib, json, pkgutil, sys
import csa_backend_triton
from csa_backend_triton.cache_keys import settle_key
from triton.runtime.jit import JITFunction

names = [found.name for found in pkgutil.iter_modules(csa_backend_triton.__path__)]
kernels = {}
for name in sorted(names, reverse=sys.argv[1] == "backwards"):
    module = importlib.import_module("csa_backend_triton." + name)
    for key, value in vars(module).items():
        if isinstance(value, JITFunction) and value.__module__ == module.__name__:
            kernels[name + "." + key] = value
for name in sorted(kernels, reverse=sys.argv[1] == "backwards"):
    settle_key(kernels[name])
found = {}
for name, kernel in kernels.items():
    values = {}
    for (constant, _), (value, _) in kernel.used_global_vals.items():
        values.setdefault(constant, set()).add(repr(value))
    twice = sorted(constant for constant, each in values.items() if len(each) > 1)
    found[name] = [kernel.cache_key, twice]
print(json.dumps(found))
"""


def keys(order: str) -> dict[str, tuple[str, list[str]]]:
    """Every kernel's key, and the names it uses for several constants, asked for in ``order``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, order],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(ran.stdout)


def test_keys_do_not_depend_on_what_was_compiled_before() -> None:
    forwards, backwards = keys("forwards"), keys("backwards")
    assert "hopper_narrow_forward.forward_kernel" in forwards
    different = [name for name, (key, _) in forwards.items() if backwards[name][0] != key]
    assert not different
    # Triton orders constants of one name by where their modules lie in memory.
    assert not {name: twice for name, (_, twice) in forwards.items() if twice}
