"""Train the demo's model in parallel, by PyTorch's own engine, and on one process for comparison.

    python examples/parallel_training.py {one,dp-tp,cp} [--steps 4]

one     a single process
dp-tp   2 x 2 processes: data parallel by FSDP2, heads and feed-forward split by a
        ``parallelize_module`` plan
cp      2 processes that share each sequence: context parallel, parameters by FSDP2

Processes are gloo ones on the CPU; for GPUs change DEVICE and BACKEND, and start with torchrun.
All three print the same losses. The indexers' own loss is left out: it wants all heads together.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from csa_dispatch import Call, Kind
from csa_dispatch.demo.corpus import draw_spans, load_corpus
from csa_dispatch.demo.model import Block, ByteModel, ModelConfig
from csa_dispatch.distributed import context_parallel_attention, gather_shards, left_halo
from csa_dispatch.nn import CompressedSparseAttention, Compressor, LayerRecord
from csa_dispatch.nn.norm import rms_norm
from csa_dispatch.nn.rope import rope_frequencies, rotate
from csa_dispatch.nn.rows import Tokens, rows_of

DEVICE, BACKEND = "cpu", "gloo"
CONFIG = ModelConfig(
    layers=(Kind.WINDOW, Kind.GATHER, Kind.DENSE),
    d_model=32,
    heads=4,
    head_dim=16,
    rope_dim=8,
    query_rank=16,
    output_rank=16,
    feed_forward=64,
    window=8,
    hca_ratio=8,
    top_k=4,
    index_heads=16,  # with few, whole scores are 0, and ties are anyone's to break
    index_dim=8,
)
BATCH, TOKENS = 4, 64


class _Copy(torch.autograd.Function):
    """The same on every rank; gradients, each rank's a part, are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = collectives.all_reduce(gradients[0].contiguous(), "sum", ctx.group)
        return collectives.wait_tensor(summed), None


class _Sum(torch.autograd.Function):
    """Each rank's part, summed; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class ShardHeads(ParallelStyle):
    """Tensor parallelism of an attention layer: heads and sinks split, shared KV whole.

    What is whole on every rank gets a part of its gradient there; ``sum_whole`` adds them up.
    """

    SPLIT = {"q_b_proj": 0, "o_a_proj": 0, "o_b_proj": 1}  # noqa: RUF012

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, CompressedSparseAttention)
        group, ranks, rank = (
            device_mesh.get_group(),
            device_mesh.size(),
            device_mesh.get_local_rank(),
        )

        def own(parameter: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(parameter.detach().chunk(ranks, dim)[rank].clone())

        for name, dim in self.SPLIT.items():
            linear = module.get_submodule(name)
            linear.weight = own(linear.weight, dim)  # type: ignore[arg-type]
        module.sinks = own(module.sinks, 0)
        module.o_a_proj.groups //= ranks
        module.tp_size = ranks
        module.register_forward_pre_hook(lambda _, given: (_Copy.apply(given[0], group),))
        module.register_forward_hook(lambda _, __, made: (_Sum.apply(made[0], group), made[1]))
        return module

    @classmethod
    def sum_whole(cls, model: nn.Module, mesh: DeviceMesh) -> None:
        """After the backward: sum the gradients of what ``_apply`` left whole."""
        for name, parameter in model.named_parameters():
            part = name.rpartition(".attention.")[2]
            split = part == "sinks" or part.removesuffix(".weight") in cls.SPLIT
            if ".attention." in name and not split and parameter.grad is not None:
                dist.all_reduce(local(parameter.grad), group=mesh.get_group())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def interleave(up: nn.Linear, ranks: int) -> None:
    """Reorder gate and value rows so that a rank's share holds as many of each."""
    with torch.no_grad():
        both = up.weight.unflatten(0, (2, ranks, -1)).transpose(0, 1)
        up.weight.copy_(both.flatten(0, 2).clone())


class SharedSequenceAttention(CompressedSparseAttention):
    """The layer on one part of a sequence; the ranks of ``mesh`` hold the parts in order."""

    mesh: DeviceMesh

    @classmethod
    def of(cls, layer: CompressedSparseAttention, mesh: DeviceMesh) -> SharedSequenceAttention:
        made = cls(layer.config)
        made.load_state_dict(layer.state_dict())
        made.mesh = mesh
        return made

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, return_record: bool = True
    ) -> tuple[Tensor, LayerRecord]:
        config = self.config
        tokens = self._tokens(hidden_states, 0)
        first = self.mesh.get_local_rank() * hidden_states.shape[1]
        query = tokens.rows.split(self.q_b_proj(tokens.residual))
        query = rms_norm(query.unflatten(-1, (-1, config.head_dim)), config.rms_norm_eps)
        query = rotate(query, tokens.positions, tokens.frequencies).transpose(1, 2)
        local_kv = tokens.rows.split(self.kv_norm(self.kv_proj(tokens.hidden)))
        local_kv = rotate(local_kv, tokens.positions, tokens.frequencies)[:, None]

        entries = picks = None
        if self.compressor is not None:
            entries = self._entries(self.compressor, hidden_states)[:, None]
        if self.indexer is not None:
            with torch.no_grad():
                keys = self._entries(self.indexer, hidden_states)
                keys = gather_shards(keys, dim=1, group=self.mesh)
                picks = self.indexer.pick(self.indexer.queries(tokens), keys, past=first)
        call = Call(
            query=query,
            local_kv=local_kv,
            sparse_kv=entries,
            kv_indices=picks,
            attention_sink=self.sinks,
            cu_seqlens=None,
            cu_seqlens_k=None,
            doc_ids=None,
            sliding_window_size=config.sliding_window,
            compress_ratio=config.compress_ratio
            if entries is not None and picks is None
            else None,
            scale=config.head_dim**-0.5,
        )
        output, lse = context_parallel_attention(
            **call._asdict(), group=self.mesh, return_lse=True
        )
        attended = rotate(output.transpose(1, 2), tokens.positions, tokens.frequencies, back=True)
        grouped = tokens.rows.join(attended).flatten(1)
        grouped = self.o_a_proj(grouped.unflatten(1, (self.o_a_proj.groups, -1)))
        result = self.o_b_proj(grouped.flatten(1)).view(hidden_states.shape)
        return result, LayerRecord(call, output, lse, None)

    def _tokens(self, hidden_states: Tensor, before: int) -> Tokens:
        """The part's tokens, preceded by ``before`` of its left neighbour's."""
        hidden, rows = rows_of(hidden_states, "BSHD")
        first = self.mesh.get_local_rank() * (rows.tokens - before) - before
        positions = torch.arange(first, first + rows.tokens, device=hidden.device)
        residual = self.q_a_norm(self.q_a_proj(hidden))
        return Tokens(
            hidden, residual, rows, positions, rope_frequencies(self.config, hidden.device)
        )

    def _entries(self, compressor: Compressor, hidden_states: Tensor) -> Tensor:
        """The entries of the part's tokens: an overlapping one needs the block before, too."""
        ratio = self.config.compress_ratio
        before = ratio if self.config.overlapping and self.mesh.get_local_rank() else 0
        halo = ratio if self.config.overlapping else 0
        seen = left_halo(hidden_states, halo, dim=1, group=self.mesh)
        tokens = self._tokens(seen, before)
        entries, _ = compressor(tokens)
        # It counted positions from 0; rotations add up.
        moved = tokens.positions[:1].expand(entries.shape[1])
        return rotate(entries, moved, tokens.frequencies)[:, before // ratio :]


def share(text: Tensor, mesh: DeviceMesh | None, mode: str) -> Tensor:
    """This process's part of a batch ``[B, T]``: some sequences, or a part of each."""
    if mesh is None:
        return text
    axis = mesh["dp"] if mode == "dp-tp" else mesh["cp"]
    return text.chunk(axis.size(), 0 if mode == "dp-tp" else 1)[axis.get_local_rank()]


def parallelize(model: ByteModel, mesh: DeviceMesh, mode: str) -> None:
    """Split ``model`` over the mesh, in place."""
    for block in model.blocks:
        assert isinstance(block, Block)
        if mode == "dp-tp":
            interleave(block.up, mesh["tp"].size())
            plan: dict[str, ParallelStyle] = {
                "attention": ShardHeads(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(block, mesh["tp"], plan)
        else:
            block.attention = SharedSequenceAttention.of(block.attention, mesh["cp"])
    # Under context parallelism too: every rank has a part of each parameter's gradient.
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp" if mode == "dp-tp" else "cp"])


def train(mode: str, steps: int) -> list[float]:
    """Losses of ``steps`` steps, the same on every process."""
    torch.manual_seed(0)
    model = ByteModel(CONFIG).to(DEVICE)
    mesh = None
    if mode != "one":
        names, sizes = (("dp", "tp"), (2, 2)) if mode == "dp-tp" else (("cp",), (2,))
        mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=names)
        parallelize(model, mesh, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    draws, corpus = torch.Generator().manual_seed(0), load_corpus()
    losses = []
    for _ in range(steps):
        spans = draw_spans(corpus.train, BATCH, TOKENS + 1, draws).to(DEVICE)
        text, targets = share(spans[:, :-1], mesh, mode), share(spans[:, 1:], mesh, mode)
        logits, _ = model(text, index_loss=False)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if mesh is not None:
            if mode == "dp-tp":
                ShardHeads.sum_whole(model, mesh["tp"])
            # Equal parts: the mean of the means is the mean. Ranks of "tp" hold the same loss.
            loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _process(rank: int, world: int, port: int, mode: str, steps: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, rank=rank, world_size=world)
    try:
        results[rank] = train(mode, steps)
    finally:
        dist.destroy_process_group()


def run(mode: str, steps: int) -> list[float]:
    """Losses of ``mode``, in processes of its own unless it is "one"."""
    if mode == "one":
        return train(mode, steps)
    world = {"dp-tp": 4, "cp": 2}[mode]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").Manager().dict()
    arguments = (world, port, mode, steps, results)
    mp.spawn(_process, args=arguments, nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("one", "dp-tp", "cp"))
    parser.add_argument("--steps", type=int, default=4)
    wanted = parser.parse_args()
    for step, loss in enumerate(run(wanted.mode, wanted.steps)):
        print(f"{wanted.mode:6} step {step}: {loss:.4f}")


if __name__ == "__main__":
    main()
