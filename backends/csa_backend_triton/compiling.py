"""Compile ahead: the kernels of given calls, in parallel, into Triton's cache on disk.

Compiling takes seconds a kernel and happens at a shape's first call otherwise. Kernels depend
on sizes only through head_dim, heads and what the sizes are multiples of, so one call of each
kind that a model makes is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from csa_dispatch.call import Call, Kind, token_bounds
from csa_dispatch.call_spec import CallSpec, check_spec, device_capability
from csa_dispatch.reasons import BackendRefused
from csa_dispatch.validation import fail
from csa_dispatch.wording import a_kind

from .backend import TritonBackend
from .choice import backward_of, forward_of
from .launching import Compilation, compile_only
from .tile_table import TABLES, take_tables


def meta_call(spec: CallSpec) -> Call:
    """A call on meta tensors, contiguous in BHSD, that ``spec`` describes."""
    dtype = spec.torch_dtype
    documents = spec.documents
    with torch.device("meta"):
        query = torch.empty(spec.batch, spec.heads, spec.tokens, spec.head_dim, dtype=dtype)
        local = torch.empty(spec.batch, spec.kv_heads, spec.tokens, spec.head_dim, dtype=dtype)
        pool = torch.empty(spec.batch, spec.kv_heads, spec.pool, spec.head_dim, dtype=dtype)
        sink = None
        if spec.sink != "none":
            sink = torch.empty(spec.heads, dtype=getattr(torch, spec.sink))
        indices = None
        if spec.kind is Kind.GATHER:
            kind = getattr(torch, spec.index_dtype)
            indices = torch.empty(spec.batch, spec.tokens, spec.slots, dtype=kind)
        offsets = torch.empty(2, dtype=torch.int32) if documents == "cu_seqlens" else None
        ids = None
        if documents == "doc_ids":
            ids = torch.empty(spec.batch, spec.tokens, dtype=torch.int32)
    windowed = spec.kind is Kind.WINDOW
    return Call(
        query,
        local,
        None if windowed else pool,
        indices,
        sink,
        offsets,
        None if windowed else offsets,
        ids,
        spec.window,
        spec.compress_ratio or None,
        spec.head_dim**-0.5,
    )


def compile_spec(spec: CallSpec, *, portable: bool = False) -> Compilation:
    """Compile what ``spec`` launches, or would launch if there were only ``portable`` kernels."""
    if spec.capability is None:
        fail("capability", None, "a CUDA compute capability", "Pass 90 for an H100, say.")
    # No kernels but the portable ones take calls that no CUDA device will run.
    chosen = spec._replace(capability=None) if portable else spec
    with compile_only(spec.capability) as session:
        call = meta_call(spec)
        bounds = token_bounds(call)
        output, lse = forward_of(chosen)(call, bounds)
        if spec.differentiable:
            backward = backward_of(chosen)
            backward(call, bounds, output, lse, output, spec.needs_grad, spec.deterministic)
    return session


def _count(spec: CallSpec) -> int:
    return len(compile_spec(spec).kernels)


def warmup(specs: Iterable[CallSpec], workers: int = 4) -> int:
    """Compile what every spec launches, ``workers`` processes at a time.

    The processes import the program's main module anew, so a script calls this under
    ``if __name__ == "__main__":``.

    Args:
        specs: calls; ``capability`` is this GPU's.
        workers: processes.

    Returns:
        How many kernels were compiled or found in the cache.

    Raises:
        TypeError: ``specs`` is one spec, or holds something else.
        ValueError: a spec without this GPU's capability, or one that describes no call; fewer
            than one worker.
        BackendRefused: a spec that the backend does not claim; its Reasons say why.
        RuntimeError: there is no CUDA device, or a process ended before its work.
    """
    if isinstance(specs, CallSpec) or not isinstance(specs, Iterable):
        remedy = "Put a single spec into a list."
        fail("specs", a_kind(specs), "a list of CallSpecs", remedy, TypeError)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        fail("workers", repr(workers), "an int of 1 or more", "Leave it out for 4.")
    specs = list(specs)
    for number, spec in enumerate(specs):
        check_claimed(f"specs[{number}]", spec)
    if specs:
        _check_device(specs)
    try:
        context = get_context("spawn")
        # Tiles that this process loaded are the ones its calls will use.
        with ProcessPoolExecutor(workers, context, take_tables, (TABLES,)) as pool:
            return sum(pool.map(_count, specs))
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process of warmup ended before its work; in a script, call warmup() under "
            "if __name__ == '__main__':, since its processes import the script anew."
        ) from error


def check_claimed(name: str, spec: object) -> None:
    """Refuse what is no spec of a call that the kernels take on CUDA."""
    if not isinstance(spec, CallSpec):
        remedy = "Only calls of attention() are compiled ahead."
        fail(name, a_kind(spec), "a CallSpec", remedy, TypeError)
    spec = check_spec(spec)
    if spec.capability is None:
        remedy = "Pass capability=90 for an H100, say."
        fail(f"{name}.capability", None, "this GPU's compute capability", remedy)
    # Specs say "cpu" unless told otherwise; what is compiled is for CUDA anyway.
    spec = spec._replace(device_type="cuda")
    reasons = TritonBackend.forward_capabilities.reasons(spec)
    if spec.differentiable and (backward := TritonBackend.backward_capabilities) is not None:
        reasons += backward.reasons(spec)
    if reasons:
        refused = {TritonBackend.name: tuple(dict.fromkeys(reasons))}
        raise BackendRefused(f"{name} is a call that triton does not run.", refused)


def _check_device(specs: list[CallSpec]) -> None:
    """Kernels are compiled for the first GPU, whatever their tiles are chosen for."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "warmup() found no CUDA device; it must run on a machine with the GPU that will run "
            "the calls. Without one kernels compile at a shape's first call."
        )
    here = device_capability(torch.device("cuda", 0))
    for number, spec in enumerate(specs):
        if spec.capability != here:
            remedy = "Warm up on the machine that will run the calls."
            fail(f"specs[{number}].capability", spec.capability, f"this GPU's, {here}", remedy)
