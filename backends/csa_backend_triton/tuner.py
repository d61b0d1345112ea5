"""An opt-in tuner: tiles measured on this machine's GPU, for calls one names.

    python -m csa_backend_triton.tuner --kind gather --heads 16 --head-dim 128 --write tiles.json

Nothing tunes by itself: without it the tables of ``tile_table`` hold. What it writes takes effect
in a process that calls ``csa_backend_triton.load_tiles("tiles.json")``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa_dispatch.bench.suite import Effort
from csa_dispatch.bench.timing import clock_for, spread, time_interleaved
from csa_dispatch.call import Call, Kind, token_bounds
from csa_dispatch.call_spec import CallSpec, check_spec, device_capability
from csa_dispatch.parity.files import check_places, write_atomically
from csa_dispatch.reasons import BackendRefused
from csa_dispatch.validation import fail
from csa_dispatch.wording import a_kind, quoted

from .choice import backward_of, forward_of
from .compiling import check_claimed, compile_spec, meta_call
from .portable_backward import backward
from .portable_forward import forward
from .tile_table import TABLES, family, forward_table, head_dim_class

WORTH = 0.98
"""A tile replaces the table's when it takes at most this share of its time."""

FINALISTS = 3
"""Candidates that are measured again, as they are and with caps on registers."""

FORWARD_TABLES = ("forward", "packed_forward")

REGISTERS = 65536
"""Of a multiprocessor of any architecture that the kernels run on."""


class Place(NamedTuple):
    """Where an entry stands in ``TABLES``."""

    table: str
    family: str
    head_dim: int
    rows: int


Entry = tuple[int, ...]
"""Keys, warps, stages and a cap on registers if any, as in the tables."""


def entry_at(place: Place) -> Entry:
    """The entry in force."""
    return TABLES[place.table][place.family][place.head_dim][place.rows]


def put(place: Place, entry: Entry) -> None:
    """Make ``entry`` the one in force, in this process."""
    TABLES[place.table][place.family][place.head_dim][place.rows] = entry


def places(spec: CallSpec) -> list[Place]:
    """The entries that the portable kernels use for a call."""
    assert spec.capability is not None
    found: dict[Place, None] = {}
    for kernel, constants, _ in compile_spec(spec, portable=True).kernels:
        name = kernel.removesuffix("_kernel")
        if name == "forward":
            name = forward_table(spec.capability, packed=not constants["SINGLE"])
        if name in TABLES:
            table = TABLES[name][family(spec.capability)]
            bound = head_dim_class(table, spec.head_dim)
            found[Place(name, family(spec.capability), bound, constants["ROWS"])] = None
    return list(found)


def candidates(entry: Entry) -> list[Entry]:
    """The entry itself, then those half, as much or twice in each of its sizes."""
    keys, _, stages, *cap = entry
    found = dict.fromkeys([entry])
    for k in (keys // 2, keys, keys * 2):
        for w in (4, 8):
            for s in (stages - 1, stages, stages + 1):
                if 16 <= k <= 128 and 1 <= s <= 4:
                    found[(k, w, s)] = None
                    found[(k, w, s, *cap)] = None
    return list(found)


def capped(entry: Entry) -> list[Entry]:
    """The tile with its registers capped so that two, three or four programs share them."""
    keys, warps, stages, *_ = entry
    caps = [REGISTERS // (32 * warps * programs) // 8 * 8 for programs in (2, 3, 4)]
    return [(keys, warps, stages, cap) for cap in caps if 80 <= cap < 255]


def choose(place: Place, times: Callable[[list[Entry]], dict[Entry, float]]) -> Entry:
    """The fastest candidate by ``times``, put in force if it is worth it.

    ``times`` leaves out candidates that cannot run. The best few have a second round.
    """
    before = chosen = entry_at(place)
    try:
        chosen = _fastest(place, before, times)
    finally:  # interrupted too
        put(place, chosen)
    return chosen


def _fastest(
    place: Place, before: Entry, times: Callable[[list[Entry]], dict[Entry, float]]
) -> Entry:
    found = times(candidates(before))
    put(place, before)
    ahead = sorted(found, key=lambda entry: found[entry])[:FINALISTS]
    finals = dict.fromkeys([before, *ahead, *(entry for one in ahead for entry in capped(one))])
    found = times(list(finals))
    if before not in found:
        return before
    best = min(found, key=lambda entry: found[entry])
    return best if found[best] <= WORTH * found[before] else before


def tunable(spec: CallSpec) -> list[Place]:
    """The entries that calls of ``spec`` really use.

    Raises:
        ValueError: the specialised kernels run them whole; these have no tiles.
    """
    tables = set(FORWARD_TABLES) if forward_of(spec) is forward else set()
    if spec.differentiable and backward_of(spec) is backward:
        tables |= {"token_gradient", "key_gradient"}
    if not tables:
        remedy = "There is nothing to tune."
        fail("spec", "a call of the Hopper kernels", "one of the portable kernels", remedy)
    return [place for place in places(spec) if place.table in tables]


def random_call(spec: CallSpec) -> Call:
    """A call on this GPU that ``spec`` describes: every slot valid, one document."""

    def filled(like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        if like.is_floating_point():
            return torch.randn(like.shape, device="cuda", dtype=like.dtype)
        return torch.randint(max(spec.pool, 1), like.shape, device="cuda", dtype=like.dtype)

    return Call(*map(filled, meta_call(spec._replace(documents="none"))))


def tune(spec: CallSpec) -> list[tuple[Place, Entry]]:
    """Tune what the portable kernels use for ``spec`` on the current GPU, one table at a time.

    The better entries are in force afterwards, in this process. Candidates that do not fit the
    GPU, or whose result is not the table's within rounding, are left out.

    Returns:
        Every entry that changed.

    Raises:
        ValueError: ``spec`` contradicts itself, is fp32, or is a call of the Hopper kernels.
        BackendRefused: a call that the backend does not claim.
        RuntimeError: there is no GPU.
    """
    spec = check_spec(spec)
    if spec.dtype == "float32":
        remedy = "There is nothing to tune: fp32 has one tile."
        fail("dtype", "'float32'", "bfloat16 or float16", remedy)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "tuning measures on a GPU, and torch sees none; run it where the calls will run."
        )
    capability = device_capability(torch.device("cuda", torch.cuda.current_device()))
    spec = spec._replace(device_type="cuda", capability=capability)
    check_claimed("spec", spec)
    tuned = tunable(spec)
    call = random_call(spec)
    bounds = token_bounds(call)
    output, lse = forward(call, bounds)
    upstream = torch.randn_like(output)
    clock = clock_for(call.query.device, flush_l2=True)

    def run(place: Place) -> tuple[Tensor | None, ...]:
        if place.table in FORWARD_TABLES:
            return forward(call, bounds)
        return backward(call, bounds, output, lse, upstream, spec.needs_grad, spec.deterministic)

    def times(place: Place, entries: list[Entry]) -> dict[Entry, float]:
        right = run(place)
        runs: dict[str, Callable[[], object]] = {}
        names = {str(entry): entry for entry in entries}

        def with_entry(entry: Entry) -> tuple[Tensor | None, ...]:
            put(place, entry)
            return run(place)

        for name, entry in names.items():
            try:
                found = with_entry(entry)
            except Exception as error:  # what compilers raise has no common class
                if "CUDA error" in str(error):
                    raise
                continue
            if all(_close(one, other) for one, other in zip(found, right, strict=True)):
                runs[name] = lambda entry=entry: with_entry(entry)
        samples = time_interleaved(runs, clock, Effort(rounds=5, seconds=0.1))
        return {
            names[name]: spread([sample.elapsed for sample in found]).median
            for name, found in samples.items()
        }

    changed: list[tuple[Place, Entry]] = []
    for place in tuned:
        before = entry_at(place)
        after = choose(place, lambda entries, place=place: times(place, entries))
        if after != before:
            changed.append((place, after))
    return changed


def _close(found: Tensor | None, right: Tensor | None) -> bool:
    if found is None or right is None:
        return found is right
    error = (found.float() - right.float()).norm() / right.float().norm().clamp(min=1e-20)
    return bool(error < 1e-2)


def save_tiles(path: str, entries: list[tuple[Place, Entry]]) -> None:
    """Write entries as JSON, whole or not at all."""
    data = [{**place._asdict(), "entry": list(entry)} for place, entry in entries]
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def _is_entry(sizes: object) -> bool:
    """Whether these are keys, warps, stages and perhaps a cap, as a tile can have them."""
    if not isinstance(sizes, list) or len(sizes) not in (3, 4):
        return False
    if any(type(size) is not int for size in sizes):
        return False
    keys, warps, stages, *cap = sizes
    powers = keys in (16, 32, 64, 128) and warps in (1, 2, 4, 8, 16)
    most = min(255, REGISTERS // (32 * warps)) if powers else 0
    return powers and 1 <= stages <= 4 and all(24 <= registers <= most for registers in cap)


def load_tiles(path: str) -> int:
    """Put the entries of a file that the tuner wrote in force, in this process; how many.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, or an entry names no place in the tables. Nothing is
            put in force then.
    """
    found: list[tuple[Place, Entry]] = []
    try:
        data = json.loads(Path(path).read_text())
        if not isinstance(data, list):
            raise TypeError(f"{a_kind(data)}, not a list")
        for item in data:
            place = Place(*(item[field] for field in Place._fields))
            if type(place.head_dim) is not int or type(place.rows) is not int:
                raise TypeError(f"{quoted(place)} is no place")
            if not _is_entry(item["entry"]):
                raise ValueError(f"{quoted(item['entry'])} is no tile")
            entry_at(place)
            found.append((place, tuple(item["entry"])))
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        what = quoted(error)
        raise ValueError(
            f"{path}: not tiles of csa_backend_triton: {what}; tune again with this version."
        ) from None
    for place, entry in found:
        put(place, entry)
    return len(found)


def _specs(arguments: argparse.Namespace) -> Iterator[CallSpec]:
    kind = Kind(arguments.kind)
    for heads in arguments.heads:
        yield CallSpec(
            kind=kind,
            dtype=arguments.dtype,
            heads=heads,
            head_dim=arguments.head_dim,
            tokens=arguments.tokens,
            window=arguments.window,
            pool=0 if kind is Kind.WINDOW else arguments.pool,
            slots=arguments.slots if kind is Kind.GATHER else 0,
            index_dtype="int32" if kind is Kind.GATHER else "none",
            compress_ratio=arguments.compress_ratio if kind is Kind.DENSE else 0,
            needs_grad=(True, True, kind is not Kind.WINDOW, True),
        )


def main() -> None:
    """Tune from the command line; prints what changed."""
    parser = argparse.ArgumentParser(prog="python -m csa_backend_triton.tuner")
    parser.add_argument("--kind", choices=[kind.value for kind in Kind], default="gather")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--heads", type=int, nargs="+", default=[16])
    parser.add_argument("--head-dim", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--compress-ratio", type=int, default=128)
    parser.add_argument("--write", help="file for load_tiles()")
    arguments = parser.parse_args()
    try:
        check_places({"--write": arguments.write})
        changed = [item for spec in _specs(arguments) for item in tune(spec)]
    except (BackendRefused, OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    for place, entry in changed:
        print(*place, "->", *entry)
    print(f"{len(changed)} entries changed")
    if arguments.write:
        save_tiles(arguments.write, changed)


if __name__ == "__main__":
    main()
