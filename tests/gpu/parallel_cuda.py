"""Check and time attention() over the GPUs of one host: tensor and context parallelism by NCCL.

    python tests/gpu/parallel_cuda.py [--json FILE] [--tokens 32768]

Parity: outputs and gradients of every rank put together against one GPU's. Times: forward and
backward at V4-Flash's sizes and ``--tokens`` tokens a GPU, medians of CUDA events in
milliseconds, of each rank; "alone" is one GPU without any communication, "cp silent" what a rank
of CP computes, its messages left out: the difference to "cp" is the communication that shows, and
the ranks' difference among themselves the balance of their work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from csa_dispatch import attention
from csa_dispatch.distributed import (
    context_parallel,
    context_parallel_attention,
    gather_shards,
    left_halo,
)
from csa_dispatch.distributed.exchange import Shards

HEADS, HEAD_DIM, WINDOW, SLOTS = 64, 512, 128, 512
RATIO = {"gather": 4, "dense": 128}
KINDS = ("window", "gather", "dense")
REPEATS = 7


def device() -> torch.device:
    return (
        torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    )


def draw(kind: str, tokens: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """A causal call of ``tokens`` tokens, the same on every rank; no leaf needs a gradient yet."""
    place = device()
    generator = torch.Generator(place).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=place, dtype=torch.bfloat16)

    made: dict[str, Any] = {
        "query": normal(1, heads, tokens, head_dim),
        "local_kv": normal(1, 1, tokens, head_dim),
        "attention_sink": torch.zeros(heads, device=place),
        "sliding_window_size": min(WINDOW, tokens // 4),
    }
    if kind == "window":
        return made
    made["sparse_kv"] = normal(1, 1, tokens // RATIO[kind], head_dim)
    if kind == "dense":
        return {**made, "compress_ratio": RATIO[kind]}
    visible = (torch.arange(tokens, device=place) + 1) // RATIO[kind]
    slots = min(SLOTS, tokens // 8)
    # Random rows of those that are visible; all of them once while they are few.
    pick = torch.rand(tokens, slots, generator=generator, device=place) * visible[:, None]
    few = torch.arange(slots, device=place).expand(tokens, slots)
    indices = torch.where(visible[:, None] > slots, pick.long(), few)
    indices = torch.where(indices < visible[:, None], indices, -1)
    return {**made, "kv_indices": indices[None].to(torch.int32)}


DIFFERENTIABLE = ("query", "local_kv", "sparse_kv", "attention_sink")
TOKEN_DIM = {"query": 2, "local_kv": 2, "sparse_kv": 2, "kv_indices": 1}


def with_leaves(made: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone().requires_grad_() if name in DIFFERENTIABLE else value
        for name, value in made.items()
    }


def shard_tokens(made: dict[str, Any]) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    return {
        name: value.chunk(world, TOKEN_DIM[name])[rank] if name in TOKEN_DIM else value
        for name, value in made.items()
    }


def shard_heads(made: dict[str, Any]) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    dims = {"query": 1, "attention_sink": 0}
    return {
        name: value.chunk(world, dims[name])[rank] if name in dims else value
        for name, value in made.items()
    }


def gradients(made: dict[str, Any]) -> dict[str, Tensor]:
    return {name: made[name].grad for name in DIFFERENTIABLE if name in made}


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error."""
    wanted = wanted.detach().float()
    return float((found.detach().float() - wanted).norm() / wanted.norm())


def parity(kind: str) -> dict[str, float]:
    """Errors of TP (DTensor) and CP results against one GPU's at 4096 tokens in all."""
    small = torch.cuda.is_available()
    made = draw(kind, 4096 if small else 64, HEADS if small else 4, HEAD_DIM if small else 16)
    one = with_leaves(made)
    expected = attention(**one)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    upstream = upstream.to(expected)
    expected.backward(upstream)
    wanted = gradients(one)
    worst: dict[str, float] = {}

    mine = with_leaves(shard_tokens(made))
    output = context_parallel_attention(**mine)
    output.backward(shard_tokens({"query": upstream})["query"])
    found = gradients(mine)
    dist.all_reduce(found["attention_sink"])
    worst["cp output"] = error(gather_shards(output.detach(), dim=2), expected)
    for name, gradient in found.items():
        whole = gradient if name == "attention_sink" else gather_shards(gradient, dim=2)
        worst[f"cp d{name}"] = error(whole, wanted[name])

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    places = {"query": Shard(1), "attention_sink": Shard(0)}
    shared = {
        name: distribute_tensor(
            value.detach(), mesh, [places.get(name, Replicate())]
        ).requires_grad_(name in DIFFERENTIABLE)
        if isinstance(value, Tensor)
        else value
        for name, value in made.items()
    }
    output = attention(**shared)
    output.backward(distribute_tensor(upstream, mesh, [Shard(1)]))
    worst["tp output"] = error(output.full_tensor(), expected)
    for name, gradient in gradients(shared).items():
        worst[f"tp d{name}"] = error(gradient.full_tensor(), wanted[name])
    return worst


def median_time(step: Callable[[], object]) -> float:
    """Median milliseconds of a step over ``REPEATS`` runs begun together."""
    times = []
    for turn in range(REPEATS + 2):
        dist.barrier()
        if torch.cuda.is_available():
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begun.record()
            step()
            ended.record()
            torch.cuda.synchronize()
            took = begun.elapsed_time(ended)
        else:
            start = time.perf_counter()
            step()
            took = 1e3 * (time.perf_counter() - start)
        if turn >= 2:
            times.append(took)
    return statistics.median(times)


def on_all_ranks(value: float) -> list[float]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return [round(item, 2) for item in found]


def step_of(
    made: dict[str, Any], run: Callable[..., Any], reduce: bool = False
) -> Callable[[], None]:
    """Forward and backward, and with ``reduce`` the sum of the shared KV's gradients."""
    made = with_leaves(made)
    upstream = torch.randn_like(made["query"])

    def step() -> None:
        found = torch.autograd.grad(
            run(**made), [made[name] for name in DIFFERENTIABLE if name in made], upstream
        )
        if reduce:
            for gradient in found[1:-1]:
                dist.all_reduce(gradient)

    return step


def exchange_of(made: dict[str, Any]) -> Callable[[], None]:
    """What context parallelism sends and receives, and nothing else, forward and backward."""
    kv = {name: made[name].detach().clone().requires_grad_() for name in TOKEN_DIM
          if name in ("local_kv", "sparse_kv") and name in made}  # fmt: skip
    halo = made["sliding_window_size"] - 1

    def step() -> None:
        joined = [left_halo(kv["local_kv"], halo, dim=2)]
        if "sparse_kv" in kv:
            joined.append(gather_shards(kv["sparse_kv"], dim=2))
        torch.autograd.grad(joined, list(kv.values()), [torch.ones_like(x) for x in joined])

    return step


class Silent(Shards):
    """Shards whose ranks make up what they would be sent."""

    def send(self, rows: Tensor, step: int) -> Tensor:
        alone = not 0 <= self.rank - step < self.count
        return rows[:0] if alone else torch.ones_like(rows)

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat([rows] * self.count)

    def scatter_sum(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.count)[self.rank]


@contextmanager
def silence() -> Iterator[None]:
    context_parallel.Shards = Silent
    try:
        yield
    finally:
        context_parallel.Shards = Shards


def reduce_of(made: dict[str, Any]) -> Callable[[], None]:
    """What tensor parallelism sends: the sums of the shared KV's gradients."""
    sums = [torch.ones_like(made[name]) for name in ("local_kv", "sparse_kv") if name in made]

    def step() -> None:
        for item in sums:
            dist.all_reduce(item)

    return step


def scaling(kind: str, tokens: int) -> dict[str, list[float]]:
    """Milliseconds on each rank: one GPU alone, then all with as many tokens each."""
    small = {} if torch.cuda.is_available() else {"heads": 4, "head_dim": 16}
    found = {"alone": on_all_ranks(median_time(step_of(draw(kind, tokens, **small), attention)))}
    whole = draw(kind, tokens * dist.get_world_size(), **small)
    mine = shard_tokens(whole)
    found["cp"] = on_all_ranks(median_time(step_of(mine, context_parallel_attention)))
    with silence():
        found["cp silent"] = on_all_ranks(median_time(step_of(mine, context_parallel_attention)))
    found["cp exchange"] = on_all_ranks(median_time(exchange_of(mine)))
    mine = shard_heads(whole)
    found["tp"] = on_all_ranks(median_time(step_of(mine, attention, reduce=True)))
    found["tp reduce"] = on_all_ranks(median_time(reduce_of(mine)))
    return found


def balance(kind: str, tokens: int, ranks: int, rank: int) -> float:
    """Milliseconds of the ``rank``-th part of ``tokens`` over ``ranks``, computed on one GPU."""
    small = {} if torch.cuda.is_available() else {"heads": 4, "head_dim": 16}
    share = tokens // ranks
    made = draw(kind, share, **small)
    place, first = device(), rank * share
    if kind == "gather":
        pool = torch.randn_like(made["sparse_kv"][:, :, :1]).expand(
            -1, -1, tokens // RATIO[kind], -1
        )
        made["sparse_kv"] = pool.contiguous()
        if rank:
            visible = first // RATIO[kind]
            made["kv_indices"] = torch.randint_like(made["kv_indices"], visible)
    elif kind == "dense":
        pool = made["sparse_kv"][:, :, :1].expand(-1, -1, tokens // RATIO[kind], -1)
        made["sparse_kv"] = pool.contiguous()
        made["cu_seqlens"] = torch.tensor([-first, share], dtype=torch.int32, device=place)
        made["cu_seqlens_k"] = torch.tensor([0, pool.shape[2]], dtype=torch.int32, device=place)
    return round(median_time(step_of(made, attention)), 2)


def worker(rank: int, world: int, tokens: int, path: str | None) -> None:
    cuda = torch.cuda.is_available()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    results: dict[str, Any] = {"world": world, "tokens": tokens, "torch": torch.__version__}

    def note(name: str, value: object) -> None:
        results[name] = value
        if rank == 0:
            print(name, json.dumps(value), flush=True)
            if path:
                Path(path).write_text(json.dumps(results, indent=1))

    for kind in KINDS:
        note(
            f"parity {kind}", {name: float(f"{value:.2e}") for name, value in parity(kind).items()}
        )
    for kind in KINDS:
        note(f"scaling {kind}", scaling(kind, tokens))
    long = 32 * tokens
    for kind in KINDS:
        parts = {part: balance(kind, long, 64, part) for part in (0, 1, 32, 63)}
        note(f"balance {kind}, {long} tokens over 64", parts)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--tokens", type=int, default=32768)
    wanted = parser.parse_args()
    world = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if torch.cuda.is_available():
        print(world, torch.cuda.get_device_name(), torch.__version__, flush=True)
    mp.spawn(worker, args=(world, wanted.tokens, wanted.json), nprocs=world, join=True)


if __name__ == "__main__":
    main()
