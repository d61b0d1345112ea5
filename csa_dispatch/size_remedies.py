"""What to do about a tensor whose dimensions are not those that a layout wants."""

from __future__ import annotations

from itertools import combinations

from torch import Tensor

from .layouts import LAYOUTS, Layout

_NAMES = {"B": "batch", "S": "tokens", "D": "head_dim"}


def query_remedy(query: Tensor, order: Layout) -> str:
    """For a query of another number of dimensions than ``order`` has."""
    wanted = len(order.query_dims)
    others = [name for name, one in LAYOUTS.items() if len(one.query_dims) == query.ndim]
    names = " or ".join(f"layout={name!r}" for name in others)
    if query.ndim > wanted:
        pass_it = f"Pass {names}, or drop" if others else "Drop"
        return f"{pass_it} or merge dimensions, with squeeze or flatten, until {wanted} are left."
    if query.ndim == wanted - 1 and "B" in order.query_dims:
        batch = f"query.unsqueeze({order.query_dims.index('B')}) if it lacks the batch"
        return f"Pass {names} if it is [T, H, D], or {batch}." if others else f"Pass {batch}."
    return f"Add what it lacks with unsqueeze, so that it has {wanted} dimensions."


def rank_remedy(name: str, kv: Tensor, order: Layout, sizes: dict[str, int]) -> str:
    """For KV of another number of dimensions than ``order`` has."""
    targets = [dims for dims in (order.shared_kv_dims, order.kv_dims) if dims is not None]
    shape = list(kv.shape)
    for dims in targets:
        missing = len(dims) - kv.ndim
        if missing > 0:
            # A lacking head is likelier than a lacking batch.
            for axes in sorted(
                combinations(range(len(dims)), missing),
                key=lambda axes: -sum(dims[axis] == "G" for axis in axes),
            ):
                made = list(shape)
                for axis in axes:
                    made.insert(axis, 1)
                if _fits(name, dims, made, sizes):
                    calls = "".join(f".unsqueeze({axis})" for axis in axes)
                    return f"Pass {name}{calls}."
        for axes in combinations(range(kv.ndim), -missing) if missing < 0 else ():
            rest = [size for axis, size in enumerate(shape) if axis not in axes]
            if all(shape[axis] == 1 for axis in axes) and _fits(name, dims, rest, sizes):
                calls = "".join(f".squeeze({axis})" for axis in reversed(axes))
                return f"Pass {name}{calls}."
    wanted = " or ".join(f"{len(dims)}" for dims in targets)
    if kv.ndim > len(order.kv_dims):
        return f"Drop or merge dimensions, with squeeze or flatten, until {wanted} are left."
    return f"Reshape it to {wanted} dimensions; a head that all queries share is a G of 1."


def kv_remedy(
    name: str, kv: Tensor, query: Tensor, order: Layout, dims: str, past: bool = False
) -> str:
    """For KV with as many dimensions as ``dims`` of ``order``, of which a size does not fit.

    Args:
        past: the caller takes rows of earlier tokens too, and BHSD alone.
    """
    sizes = _sizes(query, order)
    shape = list(kv.shape)
    changes: list[str] = []
    for letter, size in zip(dims, shape, strict=True):
        free = letter == "S" and (past or name == "sparse_kv")
        if letter != "G" and not free and size != sizes["T" if letter == "S" else letter]:
            changes.append(letter)
    if name == "local_kv" and not past:
        for other, its in LAYOUTS.items():
            if its is order or query.ndim != len(its.query_dims):
                continue
            for their in (its.kv_dims, its.shared_kv_dims):
                if their and _fits(name, their, shape, _sizes(query, its)):
                    return f"Pass layout={other!r}: query and KV fit that."
        longer = shape[dims.index("S")] > sizes["T"]
        if changes == ["S"] and longer and _divides(sizes["H"], shape, dims):
            return "With KV of earlier tokens call functional.attention_with_past(), in BHSD."
    moved = _moved(name, kv, order, dims, sizes)
    if moved and (name == "local_kv" or "B" not in changes):
        return f"Pass {moved}."
    parts: list[str] = []
    for letter in changes:
        found, wanted = shape[dims.index(letter)], sizes["T" if letter == "S" else letter]
        if letter == "B" and found == 1:
            rest = ", ".join(f"{wanted}" if other == "B" else "-1" for other in dims)
            parts.append(f"repeat its batch with {name}.expand({rest})")
        else:
            parts.append(f"make its {_NAMES[letter]} {wanted} instead of {found}")
    advice = " and ".join(parts)
    advice = f"{advice[:1].upper()}{advice[1:]}"
    return f"{advice}; or, if it is in another layout, pass {moved}." if moved else f"{advice}."


def indices_remedy(kv_indices: Tensor, wanted: list[int]) -> str:
    """For kv_indices whose shape is not ``[*wanted, K]``."""
    shape, rank = list(kv_indices.shape), len(wanted) + 1
    if kv_indices.ndim == rank + 1:
        for axis in range(rank):
            if [*shape[:axis], *shape[axis + 1 :]][:-1] == wanted:
                call = f"kv_indices.select({axis}, 0)"
                return f"Drop its extra dimension with {call}: all heads share the indices."
    if kv_indices.ndim > rank:
        return f"Drop dimensions until {rank} are left: all heads share the indices."
    if shape == wanted:
        return "For one index a token pass kv_indices.unsqueeze(-1)."
    if kv_indices.ndim == rank - 1 and rank == 3 and shape[0] == wanted[1]:
        return (
            f"To use them in every row of the batch pass kv_indices.expand({wanted[0]}, -1, -1)."
        )
    if kv_indices.ndim == rank:
        for first in range(rank - 1):
            swapped = list(shape)
            swapped[first : first + 2] = shape[first + 1], shape[first]
            if swapped[:-1] == wanted:
                return f"Pass kv_indices.transpose({first}, {first + 1})."
        if rank == 3 and shape[0] == 1 and shape[1] == wanted[1]:
            call = f"kv_indices.expand({wanted[0]}, -1, -1)"
            return f"To use them in every row of the batch pass {call}."
    return "Pass a row of indices for each token of query, -1 in unused slots."


def sink_remedy(attention_sink: Tensor, heads: int) -> str:
    """For an attention_sink whose shape is not ``[heads]``."""
    if attention_sink.ndim == 1:
        return "Under tensor parallelism (TP) pass this rank's slice of the sink."
    if attention_sink.numel() == heads:
        return "Pass attention_sink.flatten()."
    if attention_sink.ndim == 0:
        return f"For one logit of all heads pass attention_sink.expand({heads})."
    return "Pass one dimension, a logit for each head."


def _sizes(query: Tensor, order: Layout) -> dict[str, int]:
    return {"B": 1, **dict(zip(order.query_dims, query.shape, strict=True))}


def _divides(heads: int, shape: list[int], dims: str) -> bool:
    groups = shape[dims.index("G")] if "G" in dims else 1
    return groups > 0 and heads % groups == 0


def _fits(name: str, dims: str, shape: list[int], sizes: dict[str, int]) -> bool:
    """Whether KV of this shape in this order goes with a query of these sizes."""
    if len(dims) != len(shape) or not _divides(sizes["H"], shape, dims):
        return False
    for letter, size in zip(dims, shape, strict=True):
        if letter == "S" and name == "local_kv":
            if size != sizes["T"]:
                return False
        elif letter in "BD" and size != sizes[letter]:
            return False
    return True


def _moved(name: str, kv: Tensor, order: Layout, dims: str, sizes: dict[str, int]) -> str | None:
    """The call that brings KV of another layout's order into this one's, if it fits so."""
    for other in LAYOUTS.values():
        for their in (other.kv_dims, other.shared_kv_dims):
            if their is None or their == dims or sorted(their) != sorted(dims):
                continue
            if _fits(name, their, list(kv.shape), sizes):
                return f"{name}.permute({', '.join(f'{their.index(one)}' for one in dims)})"
    return None
