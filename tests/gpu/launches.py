"""Check remembered launches on a GPU, and time what the host spends on a call.

    python tests/gpu/launches.py

Small calls of Hopper's and the portable kernels, forward and backward. A repeated call must give
the first one's results, on any stream, with tensors that lie otherwise, and while a Triton hook
listens, which must hear of each launch. Host times are medians in microseconds, of calls that
find the device idle every ten.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from csa_backend_triton import backend
from external_backends import needs_of, sized
from torch import Tensor
from triton import knobs

from csa_dispatch import attention
from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.call import Call, Kind

CUDA = torch.device("cuda")
CASES = {
    "A": {},
    "C": {"head_dim": 128},
    "window only": {"kind": Kind.WINDOW},
    "portable": {"head_dim": 64, "heads": 8},
}


def results(call: Call, grad: Tensor) -> list[Tensor]:
    """Output, lse and the query's gradient: what the kernels add in one order."""
    output, lse = backend.forward(call)
    query = backend.backward(call, output, lse, grad, needs_of(call)).query
    assert query is not None
    return [output, lse, query]


def alike(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def moved(tensor: Tensor) -> Tensor:
    """The same values, one element past a multiple of 16 bytes."""
    space = tensor.new_empty(tensor.numel() + 1)
    return space[1:].view(tensor.shape).copy_(tensor)


def check(call: Call, grad: Tensor) -> int:
    """Launches of one forward and backward."""
    wanted = results(call, grad)
    assert all(torch.isfinite(tensor).all() for tensor in wanted)
    alike(results(call, grad), wanted)
    alike(results(call._replace(query=moved(call.query)), moved(grad)), wanted)
    with torch.cuda.stream(torch.cuda.Stream()):
        ready = results(call, grad)
    alike(ready, wanted)
    heard = [0, 0]

    def began(_: object) -> None:
        heard[0] += 1

    def ended(_: object) -> None:
        heard[1] += 1

    knobs.runtime.launch_enter_hook.add(began)
    knobs.runtime.launch_exit_hook.add(ended)
    try:
        alike(results(call, grad), wanted)
    finally:
        knobs.runtime.launch_enter_hook.remove(began)
        knobs.runtime.launch_exit_hook.remove(ended)
    launches = heard[0]
    assert launches >= 2, heard
    assert heard == [launches, launches], heard
    alike(results(call, grad), wanted)
    assert heard[0] == launches, "a hook was called after it was removed"
    return launches


def host_time(run: Callable[[], object]) -> float:
    times = []
    for number in range(310):
        if number % 10 == 0:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[10:])


def host_times(call: Call, grad: Tensor) -> dict[str, float]:
    """Of both directions of the backend, and of attention() with autograd around them."""
    done, needs = backend.forward(call), needs_of(call)
    leaves = [call.query.detach().requires_grad_(), call.local_kv.detach().requires_grad_()]

    def step() -> None:
        output = attention(
            *leaves,
            call.sparse_kv,
            call.kv_indices,
            attention_sink=call.attention_sink,
            sliding_window_size=call.sliding_window_size,
        )
        torch.autograd.grad(output, leaves, grad)

    return {
        "forward": host_time(lambda: backend.forward(call)),
        "backward": host_time(lambda: backend.backward(call, *done, grad, needs)),
        "attention() and its gradients": host_time(step),
    }


def main() -> int:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for name, sizes in CASES.items():
        small = {"tokens": 64, "slots": 64, "compress_ratio": 1, **sizes}
        call, grad = build_inputs(sized(**small), CUDA)  # type: ignore
        launches = check(call, grad)
        times = host_times(call, grad)
        shown = ", ".join(f"{title} {found:.0f}" for title, found in times.items())
        print(f"{name}: {launches} launches, host us: {shown}", flush=True)
    # An exit while autograd's thread still drops the last graph aborts: pytorch/pytorch#38228.
    time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
