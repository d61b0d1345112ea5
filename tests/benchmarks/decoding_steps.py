"""Steps of ``attention_with_past`` on one CPU thread: CPU time by kind, cache and tokens.

    python tests/benchmarks/decoding_steps.py [--past 4096 131072] [--tokens 1 16 128 512]

V4-Flash's attention: 64 heads of 512, one KV head, window 128, fp32; CSA picks 512 entries of
ratio 4, HCA sees every one of ratio 128. A median over the least of half a second and 3 steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from csa_dispatch.functional import attention_with_past

HEADS, HEAD_DIM, WINDOW, PICKS = 64, 512, 128, 512
RATIOS = {"window": 0, "CSA": 4, "HCA": 128}


def step_of(kind: str, past: int, tokens: int) -> Callable[[], torch.Tensor]:
    """The attention of ``tokens`` tokens after ``past``."""
    ratio = RATIOS[kind]
    entries = (past + tokens) // ratio if ratio else 0
    pool = torch.randn(1, 1, entries, HEAD_DIM) if ratio else None
    picks = torch.rand(1, tokens, entries).topk(PICKS).indices.int() if kind == "CSA" else None
    query = torch.randn(1, HEADS, tokens, HEAD_DIM)
    local_kv = torch.randn(1, 1, WINDOW - 1 + tokens, HEAD_DIM)
    sink = torch.randn(HEADS)
    return lambda: attention_with_past(
        query,
        local_kv,
        pool,
        picks,
        sink,
        past=past,
        sliding_window_size=WINDOW,
        compress_ratio=ratio if kind == "HCA" else None,
    )


def milliseconds(run: Callable[[], object], least: float = 0.5) -> float:
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return 1e3 * median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--past", type=int, nargs="+", default=[4096, 131072])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for past in options.past:
        for tokens in options.tokens:
            times = {kind: milliseconds(step_of(kind, past, tokens)) for kind in RATIOS}
            shown = "  ".join(f"{kind} {value:.1f} ms" for kind, value in times.items())
            print(f"past={past} tokens={tokens}: {shown}", flush=True)


if __name__ == "__main__":
    main()
