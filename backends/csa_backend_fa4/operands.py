"""What FA4 reads: one table of KV rows and, for each token, int32 slots into it.

The table is [local; sparse] of each batch entry. Slots are absolute row numbers, so documents are
a matter of which slots are used: packed calls run the same kernels as dense ones. (FA4's own
varlen form wants document-local slots, hence KV rows regrouped by document, and its dsink
reads rows past the last offset that nothing wrote.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csa_dispatch import Call, SlotLayout, TokenBounds, slot_layout, slot_rows, token_bounds
from csa_dispatch.call_spec import stride_class


class Operands(NamedTuple):
    """The table ``[B, N, 1, D]``, the slots int32 ``[B, T, width]`` and how they are laid out.

    Slot ``i`` of a token is used iff it is not -1; padding is -1.
    """

    table: Tensor
    indices: Tensor
    layout: SlotLayout


def build_operands(call: Call) -> Operands:
    """Table and slots of a call: a Triton kernel on CUDA, PyTorch elsewhere."""
    layout, bounds = slot_layout(call), token_bounds(call)
    if call.query.is_cuda and not isinstance(call.query, FakeTensor):
        from .operands_kernel import write_operands

        return write_operands(call, layout, bounds)
    return torch_operands(call, layout, bounds)


def torch_operands(call: Call, layout: SlotLayout, bounds: TokenBounds | None) -> Operands:
    """The PyTorch twin of ``operands_kernel.write_operands``."""
    table = shared_table(call, layout)
    if table is None:
        assert call.sparse_kv is not None
        parts = [call.local_kv.detach(), call.sparse_kv.detach()]
        table = torch.cat(parts, dim=2).transpose(1, 2).contiguous()
    return Operands(table, slot_rows(call, layout, bounds), layout)


def shared_table(call: Call, layout: SlotLayout) -> Tensor | None:
    """The table when one tensor holds all of it, without a copy where FA4 can read it; or None."""
    if not layout.pool_rows:
        return kernel_input(call.local_kv.detach().transpose(1, 2))
    if not layout.local_rows:
        assert call.sparse_kv is not None
        return kernel_input(call.sparse_kv.detach().transpose(1, 2))
    return None


def kernel_input(tensor: Tensor) -> Tensor:
    """``tensor`` itself where FA4's kernels can address it, else a contiguous copy.

    They need unit stride in the last dimension and rows on 16 bytes. FA4 passes stride 0 on to
    kernels that it compiled for other strides, so expanded tensors are copied too.
    """
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    expanded = any(step == 0 and size > 1 for step, size in steps)
    if expanded or stride_class(tensor) != "aligned":
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def dense(tensor: Tensor) -> Tensor:
    """A contiguous ``tensor``: a copy where the last stride is not 1, its size being 1 or not."""
    if tensor.is_contiguous() and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
