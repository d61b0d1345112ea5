"""The backend object: capabilities, and the entry into forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from csa_dispatch.backend import Availability, Backend
from csa_dispatch.call import Call, Gradients, Kind, token_bounds
from csa_dispatch.call_spec import CallSpec
from csa_dispatch.capabilities import Capabilities, OneOf

from .backward import Saved, backward
from .branch import Branch
from .compressor import EagerCompressor
from .dense import CountedBranch, DenseBranch
from .forward import forward
from .gathered import GatheredBranch, copies_the_pool
from .indexer import EagerIndexer
from .window import WindowBranch
from .workspace import Workspace

CAPABILITIES = Capabilities(
    dtype=OneOf(("float64", "float32", "bfloat16", "float16")),
)


class EagerBackend(Backend):
    """PyTorch operations alone, tile by tile; runs wherever torch runs, without a sync."""

    name = "eager"
    summary = "PyTorch on any device, in bounded memory"
    forward_capabilities = CAPABILITIES
    backward_capabilities = CAPABILITIES
    backward_uses_lse = True
    operations = MappingProxyType(
        {"compress_kv": EagerCompressor(), "lightning_indexer": EagerIndexer()}
    )

    def probe(self) -> Availability:
        return Availability(version=f"torch {torch.__version__}")

    @torch.no_grad()
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        with _no_autocast(call.query.device.type):
            workspace = Workspace(call.query.device)
            return forward(call, branches(call, workspace), workspace)

    @torch.no_grad()
    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        with _no_autocast(call.query.device.type):
            workspace = Workspace(call.query.device)
            saved = Saved(output, lse, grad_output)
            return backward(call, branches(call, workspace), saved, needs, workspace)

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        if spec.kind is not Kind.GATHER:
            return ()
        shared = spec.heads // spec.kv_heads
        if counting_is_faster(spec.pool, spec.slots, shared):
            return ("weighs the whole pool by counts: it is hardly larger than the selection",)
        if not copies_the_pool(spec.tokens, spec.slots, spec.pool):
            return ()
        dtype = "float64" if spec.dtype == "float64" else "float32"
        return (f"gathers from a {dtype} copy of sparse_kv",)


def branches(call: Call, workspace: Workspace) -> list[Branch]:
    """The call's sources of keys: the window, then the pool if there is one."""
    bounds = token_bounds(call)
    found: list[Branch] = [WindowBranch(call, bounds, workspace)]
    if call.kind is Kind.DENSE:
        found.append(DenseBranch(call, bounds, workspace))
    elif call.kind is Kind.GATHER:
        assert call.sparse_kv is not None
        assert call.kv_indices is not None
        shared = call.query.shape[1] // call.local_kv.shape[1]
        counted = counting_is_faster(call.sparse_kv.shape[2], call.kv_indices.shape[2], shared)
        pick = CountedBranch if counted else GatheredBranch
        found.append(pick(call, bounds, workspace))
    return found


def counting_is_faster(pool: int, slots: int, shared: int) -> bool:
    """Whether to weigh the whole pool by counts instead of gathering: S R <= K (R + 6).

    With R = H / G heads a KV head (``shared``), a gathered key costs R rows of small matmuls plus
    its copy and the scatter of its gradient, together like 6 rows more; a pool row costs R rows
    of one large matmul. Measured on a CPU, break-even is at S / K of 6 to 9 for R = 1, 3 to 4 for
    R = 4, 1.5 for R = 16 and 1.1 for R = 64.
    """
    return pool * shared <= slots * (shared + 6)


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keep a surrounding autocast from casting fp32 accumulations down."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
