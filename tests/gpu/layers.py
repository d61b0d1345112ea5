"""Check ``csa_dispatch.nn`` and the functions around attention on a GPU; time V4-Flash's layers.

    python tests/gpu/layers.py [--only times,numbers,functions,decode,compile] [--device cpu]

Numbers are held to the same module in float64 on the CPU: a relative error (Frobenius norm) may
be twice that of the module in the same dtype there, and a little more. bfloat16 layers have V4's
heads (64 of 512), float32 ones 8 of 64. A layer's picks are judged by their float64 scores and
then given to the others, so that what is compared attends to the same entries. Times are medians
of CUDA events in milliseconds, the L2 cache flushed between runs. Prints a line a check; exits 1
if any failed. ``--device cpu`` tries the program itself, with small layers for all.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa_dispatch import record_receipts
from csa_dispatch.functional import attention_with_window_lse, indexer_kl_loss, indexer_scores
from csa_dispatch.nn import CompressedSparseAttention, CSAConfig, LayerCache, LayerRecord

RATIOS = {"window": 0, "CSA": 4, "HCA": 128}
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = 200
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 32,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 16,
}
WIDE: dict[str, Any] = {
    **SMALL,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 64,
    "sliding_window": 128,
}
BEYOND = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""What an error may be beside twice the CPU's: other orders of other sums."""


class Checks:
    """Lines of what was checked, and whether all of it held."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.failed = device, 0
        self.began = time.perf_counter()

    def say(self, name: str, text: str, passed: bool = True) -> None:
        self.failed += not passed
        elapsed = time.perf_counter() - self.began
        print(f"{'ok  ' if passed else 'FAIL'} {elapsed:6.1f} s  {name}: {text}", flush=True)

    def judge(self, name: str, dtype: torch.dtype, *results: dict[str, Tensor]) -> None:
        """``found``, the same in dtype on the CPU, and in float64 there, tensor by tensor."""
        found, same, exact = results
        worst, shares = "", 0.0
        for key, right in exact.items():
            budget = 2 * error(same[key], right) + BEYOND[dtype]
            share = error(found[key], right) / budget
            if not share <= shares:  # NaN is the worst
                worst, shares = key, share
        self.say(name, f"{shares:.2f} of the budget in {worst}", shares <= 1)


def error(found: Tensor, exact: Tensor) -> float:
    """Relative Frobenius norm of the difference; of the difference alone where exact is 0."""
    size = exact.double().norm().item()
    return (found.detach().cpu().double() - exact.double()).norm().item() / (size or 1.0)


def make_layer(sizes: dict[str, Any], dtype: torch.dtype, ratio: int) -> CompressedSparseAttention:
    """A layer on the CPU with random weights, its linear maps in dtype."""
    config = CSAConfig(**sizes, compress_ratio=ratio)
    torch.manual_seed(ratio)
    layer = CompressedSparseAttention(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            deviation = weight.shape[-1] ** -0.5 if name.endswith("proj.weight") else 0.5
            weight.normal_(mean=float(name.endswith("norm.weight")), std=deviation)
    return layer


def sizes_of(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return WIDE if dtype == torch.bfloat16 and device.type == "cuda" else SMALL


class Step(NamedTuple):
    """Forward and backward of a layer and of its indexer's loss."""

    results: dict[str, Tensor]
    record: LayerRecord


def take_step(
    layer: CompressedSparseAttention, x: Tensor, upstream: Tensor, picks: Tensor | None = None
) -> Step:
    if picks is not None and layer.indexer is not None:
        layer.indexer.pick = lambda *_, **__: picks  # pyright: ignore
    x = x.detach().requires_grad_()
    output, record = layer(x, return_record=True)
    total = (output * upstream).sum()
    results = {"output": output}
    if record.indexer is not None:
        results["indexer_loss"] = record.indexer_loss()
        total = total + results["indexer_loss"]
    names, weights = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, (x, *weights))
    return Step(results | dict(zip(("x", *names), gradients, strict=True)), record)


def numbers(checks: Checks) -> None:
    for dtype in DTYPES:
        sizes = sizes_of(dtype, checks.device)
        for kind, ratio in RATIOS.items():
            here = make_layer(sizes, dtype, ratio)
            x = torch.randn(1, TOKENS, sizes["hidden_size"]).to(dtype)
            upstream = torch.randn(x.shape).to(dtype)
            there = copy.deepcopy(here).to(checks.device)
            with record_receipts() as receipts:
                found = take_step(there, x.to(checks.device), upstream.to(checks.device))
            picks = found.record.call.kv_indices
            picks = None if picks is None else picks.cpu()
            same = take_step(here, x, upstream, picks)
            exact = take_step(copy.deepcopy(here).double(), x.double(), upstream.double(), picks)
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            checks.judge(name, dtype, *(step.results for step in (found, same, exact)))
            ran = {f"{type(r.spec).__name__}/{r.direction}/{r.backend}" for r in receipts}
            passed = checks.device.type == "cpu" or not any("eager" in item for item in ran)
            checks.say(name, "ran " + " ".join(sorted(ran)), passed)
            if picks is not None:
                judge_picks(checks, name, dtype, picks, exact.record)


def judge_picks(
    checks: Checks, name: str, dtype: torch.dtype, picks: Tensor, exact: LayerRecord
) -> None:
    """Each token's picks: distinct complete entries, as many as there are, of the best scores."""
    indexer = exact.indexer
    assert indexer is not None
    query, weights = indexer.queries
    with torch.no_grad():
        scores = indexer_scores(query, indexer.keys, weights, compress_ratio=4)
    complete = (torch.arange(picks.shape[1]) + 1) // 4
    right = True
    lost = total = 0.0
    for token, count in enumerate(complete.tolist()):
        chosen = picks[0, token][picks[0, token] >= 0]
        wanted = min(count, picks.shape[2])
        right &= len(set(chosen.tolist())) == len(chosen) == wanted
        right &= not wanted or int(chosen.max()) < count
        best = scores[0, token, :count].topk(wanted).values
        lost += (best.sum() - scores[0, token, chosen.long()].sum()).item()
        total += best.abs().sum().item()
    share = lost / total
    checks.say(name, f"picks lose {share:.1e} of the best scores", right and share < BEYOND[dtype])


class Operands(NamedTuple):
    """Of attention, and of the indexer's loss."""

    query: Tensor
    local_kv: Tensor
    sparse_kv: Tensor
    sink: Tensor
    scores: Tensor

    def results(self, picks: Tensor, upstream: Tensor, window: int) -> dict[str, Tensor]:
        """Outputs and losses, and the gradients of all together."""
        query, local_kv, pool, sink, scores = self
        output, lse, window_lse = attention_with_window_lse(
            query, local_kv, pool, picks, sink, sliding_window_size=window
        )
        every = indexer_kl_loss(scores, query, pool, window_lse=window_lse, compress_ratio=4)
        picked = scores.gather(2, picks.clamp(min=0).long())
        some = indexer_kl_loss(picked, query, pool, picks, lse)
        total = (output * upstream).sum() + every + some
        gradients = torch.autograd.grad(total, self)
        return {
            "output": output,
            "lse": lse,
            "window_lse": window_lse,
            "loss of all": every,
            "loss of picks": some,
            **{f"d{name}": item for name, item in zip(self._fields, gradients, strict=True)},
        }


def functions(checks: Checks) -> None:
    """``attention_with_window_lse`` and ``indexer_kl_loss``, of picks and of every entry."""
    for dtype in DTYPES:
        sizes, entries = sizes_of(dtype, checks.device), TOKENS // 4
        heads, size = sizes["num_attention_heads"], sizes["head_dim"]
        torch.manual_seed(5)
        drawn = Operands(
            torch.randn(1, heads, TOKENS, size).to(dtype),
            torch.randn(1, 1, TOKENS, size).to(dtype),
            torch.randn(1, 1, entries, size).to(dtype),
            torch.randn(heads),
            torch.randn(1, TOKENS, entries),
        )
        table = torch.rand(1, TOKENS, entries).topk(16).indices
        complete = (torch.arange(TOKENS)[:, None] + 1) // 4
        picks = torch.where(table < complete, table, -1).int()
        upstream = torch.randn(drawn.query.shape).to(dtype)
        results = []
        for device, wide in ((checks.device, False), ("cpu", False), ("cpu", True)):
            lent = ((item.double() if wide else item).to(device) for item in drawn)
            operands = Operands(*(item.clone().requires_grad_() for item in lent))
            rest = picks.to(device), upstream.to(device), sizes["sliding_window"]
            results.append(operands.results(*rest))
        name = f"window lse and loss {str(dtype).removeprefix('torch.')}"
        checks.judge(name, dtype, *results)


@torch.no_grad()
def decode(checks: Checks) -> None:
    """A prompt, then a few tokens and single ones: the whole forward at every step."""
    for dtype in DTYPES:
        # Every entry is picked: in bfloat16 a step may round nearly equal scores otherwise.
        sizes = {**sizes_of(dtype, checks.device), "index_topk": TOKENS}
        for kind, ratio in RATIOS.items():
            layer = make_layer(sizes, dtype, ratio).to(checks.device)
            x = torch.randn(2, TOKENS, sizes["hidden_size"]).to(checks.device, dtype)
            cache = LayerCache(layer.config, 2, device=checks.device, dtype=dtype)
            whole = layer(x)
            steps = [layer(part, cache=cache) for part in x.split([100, 1, 1, 3, 45, 50], dim=1)]
            off = error(torch.cat(steps, dim=1), whole.cpu())
            name = f"decode {kind} {str(dtype).removeprefix('torch.')}"
            limit = 2e-5 if dtype == torch.float32 else 1e-2
            checks.say(name, f"off by {off:.1e}", off <= limit)


def compiled(checks: Checks) -> None:
    """Output and gradients of layers compiled into one graph: those of the same layers as are."""
    for kind, ratio in RATIOS.items():
        layer = make_layer(SMALL, torch.float32, ratio).to(checks.device)
        x = torch.randn(1, TOKENS, SMALL["hidden_size"]).to(checks.device)
        how = "inductor" if kind == "CSA" else "aot_eager"
        results = []
        for run in (torch.compile(layer, fullgraph=True, backend=how), layer):
            leaf = x.clone().requires_grad_()
            output = run(leaf)
            results.append((output, *torch.autograd.grad(output.square().sum(), leaf)))
        off = max(error(a, b.detach().cpu()) for a, b in zip(*results, strict=True))
        checks.say(f"compile {kind} {how}", f"off by {off:.1e}", off <= 2e-5)


class Timer:
    """Median milliseconds of a call, the L2 cache flushed before each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(2**26 if device.type == "cuda" else 1, device=device)

    def __call__(self, run: Callable[[], object], least: float = 0.4) -> float:
        for _ in range(3):
            run()
        times: list[float] = []
        while len(times) < 5 or sum(times) < 1e3 * least:
            times.append(self._once(run))
        return median(times)

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        self.flush.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def train(layer: CompressedSparseAttention, x: Tensor, upstream: Tensor) -> None:
    leaves = [x, *layer.parameters()]
    torch.autograd.grad(layer(x), leaves, upstream, allow_unused=True)  # the indexer's are unused


def teach(layer: CompressedSparseAttention, x: Tensor, dense: bool) -> None:
    """Forward, and the backward of the indexer's loss."""
    assert layer.indexer is not None
    _, record = layer(x, dense=dense, return_record=True)
    torch.autograd.grad(record.indexer_loss(), list(layer.indexer.parameters()))


def times(checks: Checks) -> None:
    """V4-Flash's layers in bfloat16 at T=4096, B=1."""
    on_gpu = checks.device.type == "cuda"
    sizes, tokens = ({}, 4096) if on_gpu else (SMALL, 256)
    timer = Timer(checks.device)
    for kind, ratio in RATIOS.items():
        layer = make_layer(sizes, torch.bfloat16, ratio).to(checks.device)
        x = torch.randn(1, tokens, layer.config.hidden_size).to(checks.device, torch.bfloat16)
        leaf, upstream = x.clone().requires_grad_(), torch.randn_like(x)
        name = f"times {kind} T={tokens}"
        if on_gpu:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            train(layer, leaf, upstream)
            peak = (torch.cuda.max_memory_allocated() - held) / 2**20
            checks.say(name, f"forward and backward peak at {peak:.0f} MiB beyond the inputs")
        found = {"forward and backward": timer(partial(train, layer, leaf, upstream))}
        if layer.indexer is not None:
            layer.requires_grad_(False)
            layer.indexer.requires_grad_()
            found["indexer alone, by picks"] = timer(partial(teach, layer, x, False))
            found["indexer alone, dense"] = timer(partial(teach, layer, x, True))
        with torch.no_grad():
            found["forward"] = timer(partial(layer, x))
            cache = LayerCache(layer.config, 1, device=checks.device, dtype=torch.bfloat16)
            layer(x, cache=cache)
            found["a token after them"] = timer(partial(layer, x[:, :1], cache=cache))
        checks.say(name, ", ".join(f"{what} {value:.2f} ms" for what, value in found.items()))


GROUPS: dict[str, Callable[[Checks], None]] = {
    "times": times,
    "numbers": numbers,
    "functions": functions,
    "decode": decode,
    "compile": compiled,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    checks = Checks(torch.device(options.device))
    if checks.device.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    for name in options.only.split(","):
        try:
            GROUPS[name](checks)
        except Exception as fault:  # the other groups are of interest all the same
            checks.say(name, f"{type(fault).__name__}: {fault}", False)
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
