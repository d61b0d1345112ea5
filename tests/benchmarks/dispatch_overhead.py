"""What the dispatcher adds to a call: ``attention()`` and a Plan against the backend itself.

    python tests/benchmarks/dispatch_overhead.py [--json FILE]

Tiny tensors on the eager backend, one thread, warm, decision cached. Rounds of the variants
are interleaved and the median of the per-round means is taken, so that a busy machine slows
them all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import csa_dispatch
from csa_dispatch import Call, attention, backends, resolve

ROUNDS = 31
CALLS = 200


def measure(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median time per call of each variant, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def overhead() -> dict[str, float]:
    """Times in microseconds, and added time of attention() and of a Plan over a direct call."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 4, 8, generator=generator)
    local_kv = torch.randn(1, 1, 4, 8, generator=generator)
    sparse_kv = torch.randn(1, 1, 4, 8, generator=generator)
    kv_indices = torch.randint(-1, 4, (1, 4, 2), generator=generator)
    attention_sink = torch.randn(2, generator=generator)
    tensors = (query, local_kv, sparse_kv, kv_indices, attention_sink)
    backend = backends()["eager"].backend
    assert backend is not None
    call = Call(*tensors, None, None, None, 2, None, 8**-0.5)
    plan = resolve(*tensors, sliding_window_size=2, backend="eager")
    found = measure(
        {
            "direct": lambda: backend.forward(call),
            "attention": lambda: attention(*tensors, sliding_window_size=2),
            "forced": lambda: attention(*tensors, sliding_window_size=2, backend="eager"),
            "plan": lambda: plan(*tensors, sliding_window_size=2),
        }
    )
    for name in ("attention", "forced", "plan"):
        found[f"{name}_added"] = found[name] - found["direct"]
        found[f"{name}_ratio"] = found[name] / found["direct"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    found = overhead()
    print(f"csa-dispatch {csa_dispatch.__version__}, torch {torch.__version__}, 1 thread")
    print(f"backend called directly: {found['direct']:.1f} us")
    for name in ("attention", "forced", "plan"):
        print(
            f"{name:>9}: {found[name]:.1f} us, adds {found[f'{name}_added']:.1f} us, "
            f"{found[f'{name}_ratio']:.3f} x"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
