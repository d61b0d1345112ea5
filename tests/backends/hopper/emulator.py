"""Run Gluon kernels on a CPU, as the Python they are: each warpgroup a thread.

``install`` puts a stand-in for Gluon in place of ``csa_backend_triton.gluon_compat``; kernels
imported after it are plain functions, which ``launch`` runs program by program. A wgmma is put off
until it is waited for, and copies are made by a thread of their own. Shared memory begins as NaN
(integers as the largest). So an operand that is read before it is there, or given back before it
has been read, shows in the results, and a barrier that nobody completes raises. Barriers show
their phase's parity and nothing else, as on a GPU.

Layouts, fences and registers mean nothing here; compiling checks those. Inline assembly does
nothing: who runs kernels that have some puts Python in its place.
"""

from __future__ import annotations

import math
import queue
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PATIENCE = 60.0
"""Seconds without progress that are taken for a deadlock."""

_local = threading.local()
_failures: list[BaseException] = []
"""Of the warpgroups that run; the others give up."""

_program = (0, 1)
"""Number of the program that runs, and of how many."""


class Element:
    """A pointer's type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.element_ty = dtype


class Pointer:
    """Elements of a tensor's storage; ``offset`` counts elements, or bytes once an integer."""

    def __init__(self, storage: Tensor, offset: Any, unit: int = 1) -> None:
        self.storage, self.offset, self.unit = storage, torch.as_tensor(offset), unit

    @property
    def dtype(self) -> Element:
        return Element(self.storage.dtype)

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.storage, self.offset + torch.as_tensor(step), self.unit)

    def __getitem__(self, place: Any) -> Pointer:
        return Pointer(self.storage, self.offset[place], self.unit)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Pointer:
        size = self.storage.element_size()
        return Pointer(self.storage, self.offset * size, size)


def pointer(tensor: Tensor) -> Pointer:
    """To a tensor's first element, over all of its storage."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(whole, tensor.storage_offset())


class Barrier:
    """An mbarrier; waiting sees no more of its phase than the parity."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.count = self.pending = self.phase = 0

    def arrive(self, count: int) -> None:
        with self.condition:
            self.pending -= count
            assert self.pending >= 0, "more arrivals than the barrier has in a phase"
            if self.pending == 0:
                self.pending, self.phase = self.count, self.phase + 1
                self.condition.notify_all()

    def wait(self, parity: int) -> None:
        deadline = time.monotonic() + PATIENCE
        with self.condition:
            while not self.condition.wait_for(lambda: self.phase & 1 != parity, 0.5):
                if _failures or time.monotonic() > deadline:
                    raise RuntimeError("deadlock: a barrier nobody completes")


class Shared:
    """A tile in shared memory, or an array of barriers."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.dtype = getattr(data, "dtype", None)
        self.shape = tuple(data.shape) if isinstance(data, Tensor) else ()

    def index(self, i: Any) -> Any:
        i = int(i)
        assert 0 <= i < len(self.data), "index of shared memory out of range"
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.data.view(dtype).view(*shape))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Product:
    """An unfinished wgmma."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.value: Tensor | None = None

    def run(self) -> None:
        a = self.a.data if isinstance(self.a, Shared) else self.a
        product = a.float() @ self.b.data.float()
        if self.use_acc:
            product += self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = product


def _multiply(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, bool(use_acc))
    _local.products.append(product)
    return product


def _wait_for_products(outstanding: int, deps: Sequence[Any]) -> Any:
    products = _local.products
    while len(products) > outstanding:
        products.pop(0).run()
    done = [
        dep.value if isinstance(dep, Product) and dep.value is not None else dep for dep in deps
    ]
    return done[0] if len(done) == 1 else tuple(done)


def _copy(tile: Shared, source: Pointer, mask: Any = None) -> None:
    mask = None if mask is None else torch.broadcast_to(mask, source.offset.shape).clone()
    _local.copies.append((tile, source, mask))


def _arrive_when_copied(barrier: Barrier, increment_count: bool = True) -> None:
    assert not increment_count
    copies, _local.copies = _local.copies, []
    _local.engine.put((copies, barrier))


def _commit_group() -> None:
    copies, _local.copies = _local.copies, []
    _local.groups.append(copies)


def _wait_for_groups(outstanding: int) -> None:
    while len(_local.groups) > outstanding:
        _run_copies(_local.groups.pop(0))


def _run_copies(copies: Sequence[tuple[Shared, Pointer, Any]]) -> None:
    for tile, source, mask in copies:
        tile.data.copy_(_load(source, mask, 0.0))


def _begin_warpgroup() -> None:
    _local.products, _local.copies, _local.groups = [], [], []
    _local.engine = queue.Queue()


def _copy_engine(jobs: queue.Queue) -> None:
    while (job := jobs.get()) is not None:
        copies, barrier = job
        _run_copies(copies)
        barrier.arrive(128)


def _load(source: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    if mask is None:
        return source.storage[source.offset]
    mask = torch.broadcast_to(torch.as_tensor(mask), source.offset.shape)
    values = source.storage[torch.where(mask, source.offset, 0)]
    return torch.where(mask, values, torch.as_tensor(other, dtype=values.dtype))


def _store(target: Pointer, value: Any, mask: Any = None) -> None:
    offset, value = torch.broadcast_tensors(target.offset, torch.as_tensor(value))
    value = value.to(target.storage.dtype)
    if mask is not None:
        mask = torch.broadcast_to(torch.as_tensor(mask), offset.shape)
        offset, value = offset[mask], value[mask]
    target.storage[offset] = value


def _specialize(parts: Sequence[tuple[Callable[..., None], tuple]], *_: Any) -> None:
    def run(function: Callable[..., None], arguments: tuple) -> None:
        _begin_warpgroup()
        engine = threading.Thread(target=_copy_engine, args=(_local.engine,), daemon=True)
        engine.start()
        try:
            function(*arguments)
        except BaseException as error:
            _failures.append(error)
        _local.engine.put(None)
        engine.join()

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    random.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _failures:
        first = _failures[0]
        _failures.clear()
        raise first


class _Constant:
    def __new__(cls, value: Any) -> Any:
        return value


class _Layout:
    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Barriers(_Layout): ...


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    if isinstance(layout, _Barriers):
        return Shared([Barrier() for _ in range(shape[0])])
    unset = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return Shared(torch.full(tuple(shape), unset, dtype=dtype))


def _init_barrier(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)


def _wait(barrier: Barrier, parity: Any, pred: Any = True) -> None:
    if pred:
        barrier.wait(int(parity))


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Pointer):
        return x if condition else y
    return torch.where(_tensor(condition), _tensor(x), _tensor(y))


def _decorator(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _decorator


def _gl() -> types.SimpleNamespace:
    layouts = (
        "BlockedLayout",
        "DistributedLinearLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
    )
    return types.SimpleNamespace(
        **dict.fromkeys(layouts, _Layout),
        tensor=type("tensor", (), {}),
        constexpr=_Constant,
        shared_memory_descriptor=Shared,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        program_id=lambda _: torch.tensor(_program[0]),
        num_programs=lambda _: torch.tensor(_program[1]),
        static_range=range,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=_where,
        minimum=lambda x, y, propagate_nan=None: torch.minimum(_tensor(x), _tensor(y)),
        # Of a NaN and a number both take the number.
        maximum=lambda x, y: torch.fmax(_tensor(x), torch.as_tensor(y, dtype=_tensor(x).dtype)),
        max=lambda x, axis: x.nan_to_num(-math.inf, math.inf, -math.inf).amax(axis),
        min=lambda x, axis: x.amin(axis),
        sum=lambda x, axis: x.sum(axis),
        abs=torch.abs,
        expand_dims=torch.unsqueeze,
        permute=torch.permute,
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda x, y: torch.stack((x, y), -1),
        exp2=torch.exp2,
        log2=torch.log2,
        convert_layout=lambda x, layout: x,
        load=_load,
        store=_store,
        allocate_shared_memory=_allocate,
        warp_specialize=_specialize,
        inline_asm_elementwise=lambda *_, **__: None,
    )


def stand_in() -> types.ModuleType:
    """What ``csa_backend_triton.gluon_compat`` holds, for a CPU."""
    module = types.ModuleType("csa_backend_triton.gluon_compat")
    vars(module).update(
        aggregate=_decorator,
        arrive_when_copied=_arrive_when_copied,
        barrier=lambda: None,
        commit_group=_commit_group,
        copy_async=_copy,
        fence_async_shared=lambda: None,
        gl=_gl(),
        gluon=types.SimpleNamespace(jit=_decorator, constexpr_function=_decorator),
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=_Barriers, init=_init_barrier, arrive=_arrive, wait=_wait
        ),
        wait_group=_wait_for_groups,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait_for_products,
    )
    return module


def install() -> None:
    """Stand in for Gluon, for modules imported from now on."""
    module = stand_in()
    sys.modules[module.__name__] = module


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    warps: int,
    **constants: Any,
) -> None:
    """Run a kernel's programs one after another."""
    global _program
    taken = [
        pointer(item)
        if isinstance(item, Tensor)
        else torch.tensor(item)
        if isinstance(item, (int, float))
        else item
        for item in arguments
    ]
    for number in range(grid[0]):
        _program = (number, grid[0])
        _begin_warpgroup()
        kernel(*taken, **constants)
