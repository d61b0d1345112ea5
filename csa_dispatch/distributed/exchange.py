"""What ranks that share a sequence send each other: rows of the left neighbour, and the pool.

Functional collectives, so that torch.compile can trace them. The rank's place in the sequence is
its rank in the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from csa_dispatch.validation import fail
from csa_dispatch.wording import a_kind

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a one-dimensional device mesh, or None for all processes."""

# Renamed in torch 2.13.
_all_gather: Any = getattr(collectives, "all_gather_single", collectives.all_gather_tensor)
_reduce_scatter: Any = getattr(
    collectives, "reduce_scatter_single", collectives.reduce_scatter_tensor
)


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group meant by ``group``.

    Raises:
        TypeError: anything else.
        ValueError: a device mesh of several dimensions; None without a default group; a group
            that this process is not in.
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group is None, all processes, but there is no process group; it must be given, "
                "or torch.distributed.init_process_group called first."
            )
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a device mesh of {group.ndim} dimensions; it must have one. Pass the "
                "dimension along which the sequence is split, such as mesh['cp']."
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group is one that this process is not in; it must be one of its own. Only the "
            "group's ranks call this."
        )
    if not isinstance(group, dist.ProcessGroup):
        remedy = "None is all processes; torch.distributed.new_group(ranks) makes others."
        fail("group", a_kind(group), "a ProcessGroup, a DeviceMesh or None", remedy, TypeError)
    return group


class Shards:
    """Which part of a sequence this process has: the ``rank``-th of ``count`` equal ones."""

    def __init__(self, group: Group) -> None:
        self.group = process_group(group)
        self.rank = dist.get_rank(self.group)
        self.count = dist.get_world_size(self.group)

    def send(self, rows: Tensor, step: int) -> Tensor:
        """Send ``rows`` to the neighbour ``step`` (1 or -1) places on; returns what came.

        Point to point: an all-to-all in which all other parts are empty. What came from the
        neighbour on the other side has the shape of ``rows``, or no rows at the end of the line.
        """
        to, source = self.rank + step, self.rank - step
        given, taken = [0] * self.count, [0] * self.count
        flat = rows.reshape(-1)
        if 0 <= to < self.count:
            given[to] = flat.numel()
        else:
            flat = flat[:0]
        if 0 <= source < self.count:
            taken[source] = rows.numel()
        found = collectives.all_to_all_single(flat.contiguous(), taken, given, self.group)
        return found.view(-1, *rows.shape[1:]) if sum(taken) else found.view(0, *rows.shape[1:])

    def gather(self, rows: Tensor) -> Tensor:
        """Every rank's ``rows``, in order, along the first dimension."""
        return _all_gather(rows.contiguous(), 0, self.group)

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """This rank's part of the sum of every rank's ``rows``."""
        return _reduce_scatter(rows.contiguous(), "sum", 0, self.group)


def exact(tensor: Tensor) -> Tensor:
    """In the dtype that sums over ranks are kept in: fp64 for fp64, else fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _Halo(torch.autograd.Function):
    """``[N, ...]`` to ``[halo + N, ...]``, the halo being the left neighbour's last rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: int, shards: Shards) -> Tensor:
        ctx.halo, ctx.shards = halo, shards
        came = collectives.wait_tensor(shards.send(rows[rows.shape[0] - halo :], 1))
        return torch.cat((came, rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        halo, shards = ctx.halo, ctx.shards
        own = gradient[halo if shards.rank else 0 :]
        # The first rank has no halo to give back, and sends to nobody.
        came = collectives.wait_tensor(shards.send(gradient[:halo], -1))
        if shards.rank == shards.count - 1:
            return own, None, None
        last = own.shape[0] - halo
        tail = (exact(own[last:]) + exact(came)).to(own.dtype)
        return torch.cat((own[:last], tail)), None, None


class _Gather(torch.autograd.Function):
    """``[N, ...]`` to ``[ranks * N, ...]``; gradients are summed over ranks in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return collectives.wait_tensor(shards.gather(rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        part = collectives.wait_tensor(ctx.shards.scatter_sum(exact(gradient)))
        return part.to(gradient.dtype), None


def left_halo(tensor: Tensor, halo: int, *, dim: int, group: Group = None) -> Tensor:
    """``tensor`` with the last ``halo`` rows of the left neighbour's before it along ``dim``.

    The first rank has no left neighbour and gets ``tensor`` itself. Differentiable: the halo's
    gradient goes back to the neighbour and is added to its last rows'.

    Args:
        tensor: this rank's shard; every rank's has the same shape.
        halo: 0 or more rows, at most the shard's.
        dim: the dimension that is split over the ranks.
        group: the ranks, in the order of the sequence.

    Raises:
        TypeError, ValueError: a group that is none; more halo than a shard has.
    """
    if not 0 <= halo <= tensor.shape[dim]:
        raise ValueError(
            f"halo is {halo} rows; it must be 0 to {tensor.shape[dim]}, the rows of a shard. "
            "Split the sequence over fewer ranks."
        )
    shards = Shards(group)
    if shards.count == 1 or halo == 0:
        return tensor
    return _Halo.apply(tensor.movedim(dim, 0), halo, shards).movedim(0, dim)  # pyright: ignore


def gather_shards(tensor: Tensor, *, dim: int, group: Group = None) -> Tensor:
    """Every rank's ``tensor``, joined along ``dim`` in the order of the sequence.

    Differentiable: each rank gets its part of the gradients' sum over ranks, added in fp32.

    Args:
        tensor: this rank's shard; every rank's has the same shape.
        dim: the dimension that is split over the ranks.
        group: the ranks, in the order of the sequence.

    Raises:
        TypeError, ValueError: a group that is none.
    """
    shards = Shards(group)
    if shards.count == 1 or tensor.numel() == 0:
        return tensor
    return _Gather.apply(tensor.movedim(dim, 0), shards).movedim(0, dim)  # pyright: ignore
