"""The two functions of flash-attn-4 that the adapter calls, and what they must accept.

They are the inner ones, below its autograd Function: forward and backward are routed apart here
and share nothing but output and lse, which the Function cannot promise, as it keeps its own
saved tensors and takes whatever lse it computed itself.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from csa_dispatch import Availability, Reason

DISTRIBUTION = "flash-attn-4"
REMEDY = "pip install 'csa-dispatch[fa4]'"
FORWARD, BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd_sparse_mla"

REQUIRED: dict[str, frozenset[str]] = {
    FORWARD: frozenset(
        {
            *("q", "k", "v", "qv", "softmax_scale", "learnable_sink", "pack_gqa"),
            *("return_lse", "out", "gather_kv_indices", "gather_bwd_recompute_p"),
        }
    ),
    # o_lo came with 4.0.0b33, the first version whose kernels recompute P for any head count.
    BACKWARD: frozenset(
        {
            *("q", "k", "v", "qv", "out", "dout", "lse", "p", "row_max", "gather_kv_indices"),
            *("learnable_sink", "softmax_scale", "recompute_p", "token_chunk", "o_lo"),
        }
    ),
}
"""Parameters whose presence makes a version new enough."""

DEPENDENCIES = {
    "cutlass": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tvm_ffi": "apache-tvm-ffi",
    "triton": "triton",
}
"""What flash-attn-4 and the index kernel import, by distribution; not all of it is declared."""


class EntryPoints(NamedTuple):
    """flash-attn-4's forward and sparse-MLA backward.

    With ``q`` and ``k`` None and the query as ``qv`` they compute

        out = softmax(softmax_scale * qv @ v.T over the gathered rows, sink) @ v

    forward(q, k, v, qv=...) -> out ``[B, T, H, D]``, lse fp32 ``[B, T, H]``, p, row_max, o_lo;
    backward(q, k, v, qv, out, dout, lse, p, row_max, gather_kv_indices, ...) -> dq, dk, dv (fp32),
    dqv, dsink. ``v`` is ``[B, N, 1, D]``, indices int32 ``[B, T, K]``, used iff ``0 <= i < N``.
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]


def entry_points() -> EntryPoints:
    """Import flash-attn-4 (seconds, the first time) and return its two functions."""
    interface = importlib.import_module("flash_attn.cute.interface")
    return EntryPoints(getattr(interface, FORWARD), getattr(interface, BACKWARD))


def availability() -> Availability:
    """Whether a flash-attn-4 that is new enough is here, without importing it."""
    source = interface_source()
    if source is None:
        return Availability(
            "", Reason("availability", "flash-attn-4 not installed", "flash-attn-4", REMEDY)
        )
    try:
        version = f"flash-attn-4 {metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:
        version = "flash-attn-4 of unknown version"
    try:
        missing = missing_parameters(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        actual = f"broken ({type(error).__name__}: {error})"
        return Availability(version, Reason("availability", actual, "readable source", REMEDY))
    if missing:
        actual = f"{version}, without {', '.join(missing)}"
        needed = "the sparse-MLA kernels of 4.0.0b33 or newer"
        return Availability(version, Reason("availability", actual, needed, REMEDY))
    absent = [
        distribution
        for module, distribution in DEPENDENCIES.items()
        if importlib.util.find_spec(module) is None
    ]
    if absent:
        actual = f"{', '.join(absent)} not installed"
        return Availability(
            version, Reason("availability", actual, "what flash-attn-4 imports", REMEDY)
        )
    return Availability(version)


def interface_source() -> Path | None:
    """The file that defines the entry points, found without importing ``flash_attn``.

    Importing the parent would load FlashAttention-2's CUDA extension where that is installed.
    """
    spec = importlib.util.find_spec("flash_attn")
    if spec is None:
        return None
    folders = map(Path, spec.submodule_search_locations or ())
    candidates = (folder / "cute" / "interface.py" for folder in folders)
    return next((path for path in candidates if path.is_file()), None)


def missing_parameters(source: str) -> list[str]:
    """Entry points, or parameters of theirs, that ``source`` does not define.

    Raises:
        SyntaxError: it is not Python.
    """
    found = {
        node.name: {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in REQUIRED
    }
    missing: list[str] = []
    for name, parameters in REQUIRED.items():
        if name not in found:
            missing.append(f"{name}()")
        else:
            missing += [f"{name}({item}=)" for item in sorted(parameters - found[name])]
    return missing
