"""check_values for a shared sequence: what one rank refuses, every rank refuses, before any waits.

An opaque operator, so that compiled code checks when it runs. It hands back copies of what it
checked: work that needs them cannot be moved before it, nor it be dropped from a graph.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from csa_dispatch.autograd import Needs
from csa_dispatch.call import Call
from csa_dispatch.forcing import Forced
from csa_dispatch.operators import CALL_SCHEMA, CALL_SIZE
from csa_dispatch.validation import fail
from csa_dispatch.value_checks import check_values

from .exchange import Shards

_CHECKED = ("kv_indices", "cu_seqlens", "cu_seqlens_k", "doc_ids")


def checked_together(call: Call, needs: Needs, forced: Forced, shards: Shards) -> Call:
    """``call``, with copies of what was checked in it.

    Raises:
        ValueError: a value that ``check_values`` refuses, or ranks that disagree; on every rank.
    """
    tensors = (item.detach() if isinstance(item, Tensor) else item for item in call)
    names = forced.forward or "", forced.backward or ""
    copies = check_shared_op(*tensors, list(needs), *names, shards.group.group_name)
    given = [name for name in _CHECKED if getattr(call, name) is not None]
    return call._replace(**dict(zip(given, copies, strict=True)))


@torch.library.custom_op(
    "csa_dispatch::check_shared",
    mutates_args=(),
    schema=(
        f"({CALL_SCHEMA}, bool[] needs_grad, str backend, str backward_backend, str group) "
        "-> Tensor[]"
    ),
)
def check_shared_op(*arguments: Any) -> list[Tensor]:
    """Copies of the tensors that hold values to check."""
    call, (*described, name) = Call(*arguments[:CALL_SIZE]), arguments[CALL_SIZE:]
    resolve = dist.distributed_c10d._resolve_process_group  # pyright: ignore
    shards = Shards(resolve(name))
    try:
        check_values(call, shards.rank, shards.count)
    except ValueError as error:
        agree({"error": str(error)}, shards)
        raise
    _check_seams(agree(_metadata(call, *described), shards, _ends(call.doc_ids)))
    return [tensor.clone() for tensor in _tensors(call)]


@check_shared_op.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in _tensors(Call(*arguments[:CALL_SIZE]))]


def _tensors(call: Call) -> list[Tensor]:
    found = (getattr(call, name) for name in _CHECKED)
    return [tensor for tensor in found if tensor is not None]


def _metadata(call: Call, needs: list[bool], *names: str) -> dict[str, object]:
    """All of a call that must be the same on every rank, offsets' values included."""
    found: dict[str, object] = {
        argument: name or None
        for argument, name in zip(("backend", "backward_backend"), names, strict=True)
    }
    inputs = ("query", "local_kv", "sparse_kv", "attention_sink")
    # Gradients go back between the ranks, or do not.
    for name, needed in zip(inputs, needs, strict=True):
        found[f"{name}'s requires_grad"] = needed
    for name, value in call._asdict().items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        found[f"{name}'s shape"] = tuple(value.shape)
        found[f"{name}'s dtype"] = str(value.dtype)
        if name in ("cu_seqlens", "cu_seqlens_k"):
            found[name] = value.tolist()
    return found


def agree(
    mine: dict[str, object], shards: Shards, ends: list[list[int]] | None = None
) -> list[list[list[int]] | None]:
    """Compare what the ranks pass, on the host; ``mine["error"]`` is a rank's own refusal.

    Returns:
        Every rank's ``ends``, which may differ.

    Raises:
        ValueError: they differ, or another rank refused; on every rank that did not.
    """
    gathered: list[Any] = [None] * shards.count
    dist.all_gather_object(gathered, (mine, ends), group=shards.group)
    found = [theirs for theirs, _ in gathered]
    if "error" in mine:
        return []  # the caller has it
    for rank, theirs in enumerate(found):
        if "error" in theirs:
            raise ValueError(f"rank {rank} of the group refuses its arguments: {theirs['error']}")
    for rank, theirs in enumerate(found):
        for name in {**found[0], **theirs}:
            first, other = found[0].get(name), theirs.get(name)
            if first != other:
                padded = "Pad the sequence and the pool to a multiple of the ranks."
                remedy = padded if "shape" in name else "Pass rank 0's on every rank."
                actual = f"{other} on rank {rank} and {first} on rank 0"
                fail(name, actual, "the same on every rank", remedy)
    return [theirs for _, theirs in gathered]


def _ends(doc_ids: Tensor | None) -> list[list[int]] | None:
    """The first and the last token's ids, of each batch entry."""
    if doc_ids is None or doc_ids.shape[1] == 0:
        return None
    return doc_ids[:, [0, -1]].tolist()


def _check_seams(ends: list[list[list[int]] | None]) -> None:
    """Refuse ids that decrease from one rank to the next."""
    for rank, (left, right) in enumerate(pairwise(ends)):
        for batch, ((_, last), (first, _)) in enumerate(zip(left or [], right or [], strict=True)):
            if first < last:
                fail(
                    "doc_ids",
                    f"{last} at the end of rank {rank} and {first} at the beginning of rank "
                    f"{rank + 1}, in batch entry {batch}",
                    "non-decreasing along the whole sequence",
                    "Number the documents anew over all ranks.",
                )
