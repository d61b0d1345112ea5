"""Check what training frameworks do with attention() on a GPU, backend by backend.

    python tests/gpu/frameworks_cuda.py [--backend NAME ...] [--only GROUP ...]

Groups: compile (torch.compile, forward and backward, static, dynamic and twenty packed layouts),
graphs (CUDA graphs, plain and mode="reduce-overhead", offsets changed between replays), waits
(nothing waits for the device), repeats (bitwise repeatability, and what a document's neighbours
change), autocast. Prints a line a check and exits 1 if any failed. Calls gather by index, those of
flex see all compressed entries.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from csa_dispatch import attention, record_receipts

DEVICE = "cuda"
Step = Callable[..., list[Tensor]]


def tensors(
    *,
    heads: int = 16,
    tokens: int = 33,
    pool: int = 40,
    slots: int = 20,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 27,
) -> list[Tensor]:
    """Query, local_kv, sparse_kv, sink (leaves) and kv_indices."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = [
        torch.randn(shape, generator=generator, device=DEVICE).to(dtype).requires_grad_()
        for shape in (
            (batch, heads, tokens, head_dim),
            (batch, 1, tokens, head_dim),
            (batch, 1, pool, head_dim),
        )
    ]
    sink = torch.randn(heads, generator=generator, device=DEVICE).requires_grad_()
    indices = torch.randint(-2, pool, (batch, tokens, slots), generator=generator, device=DEVICE)
    return [*made, sink, indices.to(torch.int32)]


V4 = {"heads": 64, "head_dim": 512, "tokens": 96, "pool": 64, "slots": 64}
"""V4's heads, so that kernels made for them run; few tokens."""


def offsets_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def upstream(output: Tensor) -> Tensor:
    """A gradient for ``output`` that is the same in every row."""
    weights = torch.linspace(-1, 1, output.shape[-1], device=DEVICE).to(output.dtype)
    return weights.expand(output.shape).contiguous()


def seen_entries(backend: str, indices: Tensor | None) -> dict[str, Any]:
    """How a call says what it sees of the pool: no static mask says what indices select."""
    if backend == "flex" or indices is None:
        return {"compress_ratio": 2}
    return {"kv_indices": indices}


def step_of(backend: str, **scalars: Any) -> Step:
    """Forward and backward in one function: output and the gradients of its four leaves."""

    def step(query: Tensor, local_kv: Tensor, pool: Tensor, sink: Tensor, indices: Tensor | None,
             *offsets: Tensor) -> list[Tensor]:  # fmt: skip
        packed = dict(zip(("cu_seqlens", "cu_seqlens_k"), offsets, strict=False))
        output = attention(
            query, local_kv, pool, attention_sink=sink, backend=backend,
            **seen_entries(backend, indices), **packed, **scalars,
        )  # fmt: skip
        leaves = [query, local_kv, pool, sink]
        return [output, *torch.autograd.grad(output, leaves, upstream(output))]

    return step


def near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def bits_equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call_forward(backend: str) -> Callable[..., Tensor]:
    """What is compiled: the call alone, so that autograd's own compiled backward runs."""

    def forward(query: Tensor, local_kv: Tensor, pool: Tensor, sink: Tensor, indices: Tensor,
                *offsets: Tensor) -> Tensor:  # fmt: skip
        packed = dict(zip(("cu_seqlens", "cu_seqlens_k"), offsets, strict=False))
        output = attention(
            query * 1, local_kv, pool, attention_sink=sink, backend=backend,
            sliding_window_size=5, **seen_entries(backend, indices), **packed,
        )  # fmt: skip
        return output * 2

    return forward


def run_compiled(function: Callable[..., Tensor], made: list[Tensor], *offsets: Tensor) -> list:
    output = function(*made, *offsets)
    gradients = torch.autograd.grad(output, made[:4], upstream(output))
    return [output.detach().clone(), *(gradient.clone() for gradient in gradients)]


def compile_lengths(backend: str, dynamic: bool | None) -> str:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        call_forward(backend), fullgraph=True, dynamic=dynamic, backend=counter
    )
    for tokens in (33, 47, 64):
        made = tensors(tokens=tokens)
        near(run_compiled(compiled, made), run_compiled(call_forward(backend), made))
    assert counter.frame_count <= (1 if dynamic else 2), counter.frame_count
    return f"{counter.frame_count} graphs for three lengths"


def kernel_caches() -> int:
    """Compiled Triton kernels held by the backend's launchers."""
    if "csa_backend_triton.launching" not in sys.modules:
        return 0
    held = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("csa_backend_triton"):
            for value in vars(module).values():
                for cache in getattr(value, "device_caches", {}).values():
                    held += len(cache[0])
    return held


def compile_layouts(backend: str) -> str:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(call_forward(backend), fullgraph=True, backend=counter)
    made = tensors(tokens=32, pool=12)
    first = 0
    for cut in range(1, 21):
        offsets = offsets_of(0, cut, 32), offsets_of(0, cut // 2, 12)
        plain = run_compiled(call_forward(backend), made, *offsets)
        near(run_compiled(compiled, made, *offsets), plain)
        first = first or kernel_caches()
    assert counter.frame_count == 1, counter.frame_count
    assert kernel_caches() == first, (
        f"{first} kernels after one layout, {kernel_caches()} after 20"
    )
    return f"20 layouts, 1 graph, {first} kernels throughout"


G29 = {"heads": 64, "tokens": 12, "pool": 8, "slots": 4}
LAYOUTS = [
    ((0, 4, 8, 8), (0, 2, 5, 5)),
    ((0, 1, 7, 9), (0, 1, 6, 8)),
    ((0, 0, 3, 12), (0, 0, 8, 8)),
]


def covered(results: list[Tensor], offsets: Tensor) -> list[Tensor]:
    """Without the output's rows past the last offset, which are undefined."""
    return [results[0][:, :, : int(offsets[-1])], *results[1:]]


def graph_plain(backend: str) -> str:
    """Capture with one layout, replay with others, for each head dim the kernels differ in."""
    for head_dim in (64, 512):
        made = tensors(**G29, head_dim=head_dim)
        static = [offsets_of(*values) for values in LAYOUTS[0]]
        step = step_of(backend, sliding_window_size=3)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(*made, *static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = step(*made, *static)
        for layout in LAYOUTS:
            fresh = [offsets_of(*values) for values in layout]
            for place, values in zip(static, fresh, strict=True):
                place.copy_(values)
            for item in held:
                item.fill_(float("nan"))
            graph.replay()
            near(covered(held, fresh[0]), covered(step(*made, *fresh), fresh[0]))
    return f"{len(LAYOUTS)} layouts of one capture, head dims 64 and 512"


def graph_compiled(backend: str) -> str:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call_forward(backend), fullgraph=True, mode="reduce-overhead")
    made = tensors(**G29, head_dim=512)
    for _ in range(2):
        for layout in LAYOUTS:
            offsets = [offsets_of(*values) for values in layout]
            torch.compiler.cudagraph_mark_step_begin()
            found = run_compiled(compiled, made, *offsets)
            wanted = run_compiled(call_forward(backend), made, *offsets)
            near(covered(found, offsets[0]), covered(wanted, offsets[0]))
    for _ in range(3):  # no documents, and plain calls in between
        torch.compiler.cudagraph_mark_step_begin()
        near(run_compiled(compiled, made), run_compiled(call_forward(backend), made))
    skipped = counters["inductor"]["cudagraph_skips"]
    assert not skipped, f"cudagraphs skipped {skipped} times"
    return "cudagraphs not skipped"


def waits(backend: str) -> str:
    """No kind, packed or not, plain or compiled, waits for the device."""
    step = step_of(backend, sliding_window_size=5)
    ran = 0
    for sizes in ({}, V4):
        made = tensors(**sizes)
        tokens, pool = made[0].shape[2], made[2].shape[2]
        packed = [offsets_of(0, 3, tokens), offsets_of(0, 1, pool)]
        for indices in [None] if backend == "flex" else [made[4], None]:
            for offsets in ([], packed):
                step(*made[:4], indices, *offsets)
                with no_waiting():
                    step(*made[:4], indices, *offsets)
                ran += 1
    torch._dynamo.reset()
    made = tensors()
    compiled = torch.compile(call_forward(backend), fullgraph=True, backend="aot_eager")
    run_compiled(compiled, made)
    with no_waiting():
        run_compiled(compiled, made)
    return f"{ran} calls and a compiled one"


def repeats(backend: str) -> str:
    """G27, and the same at V4's heads: ten deterministic runs are equal in every bit."""
    step = step_of(backend, sliding_window_size=5)
    with deterministic():
        for sizes in ({"batch": 3}, {**V4, "batch": 2}):
            made = tensors(**sizes)
            first = step(*made)
            for _ in range(9):
                assert bits_equal(step(*made), first), sizes
    made = tensors(batch=3)
    output = call_forward(backend)(*made)
    with deterministic():  # switched on between forward and backward
        runs = [torch.autograd.grad(output.sum(), made[:4], retain_graph=True) for _ in range(3)]
    assert all(bits_equal(list(run), list(runs[0])) for run in runs)
    return "10 runs, and switched on before the backward"


def neighbours(backend: str) -> str:
    """Whether a document's bits depend on its batch slot, or on what it is packed with."""
    found = []
    for name, sizes in (("D64", {"heads": 64}), ("V4", V4)):
        made = tensors(**sizes, batch=3, dtype=torch.bfloat16)
        step = step_of(backend, sliding_window_size=5)
        whole = step(*made)
        slot = [step(*(x[row : row + 1] for x in made[:3]), made[3], made[4][row : row + 1])
                for row in range(3)]  # fmt: skip
        forward = all(torch.equal(whole[0][row : row + 1], slot[row][0]) for row in range(3))
        backward = all(
            torch.equal(whole[place][row : row + 1], slot[row][place])
            for row in range(3)
            for place in (1, 2, 3)
        )
        packed, alone = packed_results(step, made)
        packed_forward = bits_equal([packed[0]], [alone[0]])
        packed_backward = bits_equal(packed[1:], alone[1:])
        found.append(
            f"{name}: slot fwd {forward} bwd {backward}, "
            f"packed fwd {packed_forward} bwd {packed_backward}"
        )
        near(packed, alone)
    return "; ".join(found)


def packed_results(step: Step, made: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Output, dquery, dlocal_kv, dsparse_kv of documents packed into one row, and alone."""
    batch, _, tokens, _ = made[0].shape
    pool = made[2].shape[2]

    def join(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[row : row + 1] for row in range(batch)], dim=2)

    joined = [join(x).detach().requires_grad_() for x in made[:3]]
    indices = torch.cat([made[4][row : row + 1] for row in range(batch)], dim=1)
    cuts = offsets_of(*range(0, batch * tokens + 1, tokens))
    cuts_k = offsets_of(*range(0, batch * pool + 1, pool))
    packed = step(*joined, made[3], indices, cuts, cuts_k)[:4]
    alone = [
        step(*(x[row : row + 1] for x in made[:3]), made[3], made[4][row : row + 1])[:4]
        for row in range(batch)
    ]
    return packed, [torch.cat(items, dim=2) for items in zip(*alone, strict=True)]


def autocast(backend: str) -> str:
    made = tensors(dtype=torch.float32)
    for compiled in (False, True):
        torch._dynamo.reset()
        call: Any = partial(attention, sliding_window_size=5, return_lse=True, backend=backend)
        if compiled:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        with torch.autocast("cuda", dtype=torch.bfloat16), record_receipts() as receipts:
            output, lse = call(*made[:3], attention_sink=made[3], **seen_entries(backend, made[4]))
            gradients = torch.autograd.grad(output.sum(), made[:4])
        assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        seen = {(item.spec.dtype, item.spec.sink) for item in receipts}
        assert seen == {("bfloat16", "float32")}, seen
    return "query and KV in bf16, sink and gradients in fp32"


CHECKS: dict[str, list[Callable[[str], str]]] = {
    "compile": [partial(compile_lengths, dynamic=None), partial(compile_lengths, dynamic=True),
                compile_layouts],
    "graphs": [graph_plain, graph_compiled],
    "waits": [waits],
    "repeats": [repeats, neighbours],
    "autocast": [autocast],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["triton", "eager"])
    parser.add_argument("--only", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    wanted = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    for backend in wanted.backend:
        for group in wanted.only:
            for check in CHECKS[group]:
                name = getattr(check, "__name__", "") or f"compile_lengths {check.keywords}"
                begun = time.perf_counter()
                try:
                    verdict = f"ok    {check(backend)}"
                except Exception as error:
                    failed += 1
                    traceback.print_exc()
                    verdict = f"FAIL  {type(error).__name__}: {str(error)[:300]}"
                took = time.perf_counter() - begun
                print(f"{backend:8} {name:32} {took:5.1f} s  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
