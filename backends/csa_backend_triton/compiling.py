"""Compile ahead: the kernels of given calls, in parallel, into Triton's cache on disk.

Compiling takes seconds a kernel and happens at a shape's first call otherwise. Kernels depend
on sizes only through head_dim, heads and what the sizes are multiples of, so one call of each
kind that a model makes is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from csa_dispatch.call import Call, Kind, token_bounds
from csa_dispatch.call_spec import CallSpec

from .choice import backward_of, forward_of
from .launching import Compilation, compile_only


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
        raise ValueError("capability is None, expected a CUDA compute capability such as 90")
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

    Args:
        specs: calls; ``capability`` is this GPU's.
        workers: processes.

    Returns:
        How many kernels were compiled or found in the cache.

    Raises:
        ValueError: a spec without a capability.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(_count, specs))
