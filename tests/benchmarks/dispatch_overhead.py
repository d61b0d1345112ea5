"""What the dispatcher adds to a call: ``attention()`` and a Plan against the backend itself.

    python tests/benchmarks/dispatch_overhead.py [--json FILE]

Added time is measured on a backend that costs nothing (it returns ready tensors), so that no
kernel's noise hides microseconds; the ratio on the eager backend, the cheapest real one. Tiny
tensors, one thread, warm, decision cached. Rounds of the variants are interleaved and the least
of the rounds' means is taken: other load on the machine can only add.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

import csa_dispatch
from csa_dispatch import Backend, Call, Capabilities, Gradients, attention, backends, resolve


class Free(Backend):
    """Returns ready tensors: what remains is the dispatcher."""

    name = "free"
    forward_capabilities = Capabilities()
    backward_capabilities = Capabilities()

    def __init__(self, query: Tensor) -> None:
        self.results = query.detach().clone(), torch.zeros(query.shape[:3])

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return self.results

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        return Gradients(call.query, call.local_kv, call.sparse_kv, call.attention_sink)


def measure(
    variants: dict[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, float]:
    """Time per call of each variant in its quietest round, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: min(values) for name, values in times.items()}


def overhead() -> dict[str, float]:
    """Added microseconds and ratios of attention() and of a Plan over a direct call."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 4, 8, generator=generator)
    local_kv = torch.randn(1, 1, 4, 8, generator=generator)
    sparse_kv = torch.randn(1, 1, 4, 8, generator=generator)
    kv_indices = torch.randint(-1, 4, (1, 4, 2), generator=generator)
    attention_sink = torch.randn(2, generator=generator)
    tensors = (query, local_kv, sparse_kv, kv_indices, attention_sink)
    call = Call(*tensors, None, None, None, 2, None, 8**-0.5)
    if "free" not in backends():
        csa_dispatch.register_backend(Free(query))
    found: dict[str, float] = {}
    # Short rounds of the free one: on a busy machine some still fall into a quiet moment.
    for name, rounds, calls in (("free", 500, 50), ("eager", 31, 20)):
        backend = backends()[name].backend
        assert backend is not None
        plan = resolve(*tensors, sliding_window_size=2, backend=name)
        with csa_dispatch.use_backend(name):
            times = measure(
                {
                    "direct": lambda call=call, backend=backend: backend.forward(call),
                    "attention": lambda: attention(*tensors, sliding_window_size=2),
                    "plan": lambda plan=plan: plan(*tensors, sliding_window_size=2),
                },
                rounds,
                calls,
            )
        for variant in ("attention", "plan"):
            if name == "free":
                found[f"{variant}_added_us"] = times[variant] - times["direct"]
            else:
                found[f"{variant}_ratio"] = times[variant] / times["direct"]
        found[f"{name}_direct_us"] = times["direct"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    found = overhead()
    print(f"csa-dispatch {csa_dispatch.__version__}, torch {torch.__version__}, 1 thread")
    print(f"eager called directly: {found['eager_direct_us']:.0f} us")
    for name in ("attention", "plan"):
        added, ratio = found[f"{name}_added_us"], found[f"{name}_ratio"]
        print(f"{name}: adds {added:.1f} us; {ratio:.3f} x eager called directly")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
