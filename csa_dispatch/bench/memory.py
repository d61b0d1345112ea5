"""Extra memory of a call: the peak of what it allocates beyond what it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.profiler import profile


def extra_memory(run: Callable[[], Iterable[Tensor | None]], device: torch.device) -> int:
    """Peak bytes allocated during ``run`` beyond the tensors that it returns.

    On CUDA as the caching allocator counts it, on the CPU as the profiler records every
    allocation and release; what a library takes by itself is in neither.

    Args:
        run: makes the call; the tensors it returns do not count.
        device: where it runs.
    """
    peak, results = (_on_cuda if device.type == "cuda" else _on_cpu)(run, device)
    returned = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in results
        if tensor is not None
    }
    return max(0, peak - sum(returned.values()))


def _on_cuda(
    run: Callable[[], Iterable[Tensor | None]], device: torch.device
) -> tuple[int, list[Tensor | None]]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = list(run())
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, results


def _on_cpu(
    run: Callable[[], Iterable[Tensor | None]], device: torch.device
) -> tuple[int, list[Tensor | None]]:
    del device
    # Some builds of the profiler print its start and end; read when it first starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    recorded = profile(profile_memory=True, use_cpu=True)
    with recorded:
        results = list(run())
    assert recorded.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())  # pyright: ignore[reportAttributeAccessIssue]
        for event in recorded.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak, results
