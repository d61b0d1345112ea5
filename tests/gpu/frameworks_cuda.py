"""Check what training frameworks do with attention() on a GPU, backend by backend.

    python tests/gpu/frameworks_cuda.py [--backend NAME ...] [--only GROUP ...]

Groups: compile (torch.compile, forward and backward, static, dynamic and twenty packed layouts),
graphs (CUDA graphs, plain and mode="reduce-overhead", offsets changed between replays), waits
(nothing waits for the device), repeats (bitwise repeatability, and what a document's neighbours
change), autocast. Prints a line a check and exits 1 if any failed. framework_calls.py says what
each backend is given.
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
from framework_calls import SUBJECTS, V4, Subject, offsets_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from csa_dispatch import BackendRefused, attention, record_receipts

Step = Callable[..., list[Tensor]]


def step_of(subject: Subject, **scalars: Any) -> Step:
    """Forward and backward in one function: output and the gradients of its four leaves."""

    def step(query: Tensor, local_kv: Tensor, pool: Tensor, sink: Tensor, indices: Tensor | None,
             *offsets: Tensor) -> list[Tensor]:  # fmt: skip
        output = attention(
            query, local_kv, attention_sink=sink, **subject.forced(),
            **subject.seen(pool, indices), **subject.packed(offsets), **scalars,
        )  # fmt: skip
        return [output, *subject.gradients(output, [query, local_kv, pool, sink])]

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


def call_forward(subject: Subject) -> Callable[..., Tensor]:
    """What is compiled: the call alone, so that autograd's own compiled backward runs."""

    def forward(query: Tensor, local_kv: Tensor, pool: Tensor, sink: Tensor, indices: Tensor,
                *offsets: Tensor) -> Tensor:  # fmt: skip
        output = attention(
            query * 1, local_kv, attention_sink=sink, sliding_window_size=5,
            **subject.forced(), **subject.seen(pool, indices), **subject.packed(offsets),
        )  # fmt: skip
        return output * 2

    return forward


def run_compiled(
    subject: Subject, function: Callable[..., Tensor], made: list[Tensor], *offsets: Tensor
) -> list[Tensor]:
    output = function(*made, *offsets)
    gradients = subject.gradients(output, made[:4])
    return [output.detach().clone(), *(gradient.clone() for gradient in gradients)]


def run_plain(subject: Subject, made: list[Tensor], *offsets: Tensor) -> list[Tensor]:
    return run_compiled(subject, call_forward(subject), made, *offsets)


def compile_lengths(subject: Subject, dynamic: bool | None) -> str:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        call_forward(subject), fullgraph=True, dynamic=dynamic, backend=counter
    )
    for tokens in (33, 47, 64):
        made = subject.tensors(tokens=tokens)
        near(run_compiled(subject, compiled, made), run_plain(subject, made))
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


def compile_layouts(subject: Subject) -> str:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(call_forward(subject), fullgraph=True, backend=counter)
    made = subject.tensors(tokens=32, pool=12)
    first = 0
    for cut in range(1, 21):
        offsets = offsets_of(0, cut, 32), offsets_of(0, cut // 2, 12)
        plain = run_plain(subject, made, *offsets)
        near(run_compiled(subject, compiled, made, *offsets), plain)
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


def graph_plain(subject: Subject) -> str:
    """Capture with one layout, replay with others, for each head dim the kernels differ in."""
    for head_dim in subject.head_dims:
        made = subject.tensors(**G29, head_dim=head_dim)
        static = [offsets_of(*values) for values in LAYOUTS[0]]
        step = step_of(subject, sliding_window_size=3)
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
    return f"{len(LAYOUTS)} layouts of one capture, head dims {subject.head_dims}"


def graph_compiled(subject: Subject) -> str:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call_forward(subject), fullgraph=True, mode="reduce-overhead")
    made = subject.tensors(**G29, head_dim=512)
    for _ in range(2):
        for layout in LAYOUTS:
            offsets = [offsets_of(*values) for values in layout]
            torch.compiler.cudagraph_mark_step_begin()
            found = run_compiled(subject, compiled, made, *offsets)
            wanted = run_plain(subject, made, *offsets)
            near(covered(found, offsets[0]), covered(wanted, offsets[0]))
    for _ in range(3):  # no documents, and plain calls in between
        torch.compiler.cudagraph_mark_step_begin()
        near(run_compiled(subject, compiled, made), run_plain(subject, made))
    skipped = counters["inductor"]["cudagraph_skips"]
    assert not skipped, f"cudagraphs skipped {skipped} times"
    return "cudagraphs not skipped"


def waits(subject: Subject) -> str:
    """No kind, packed or not, plain or compiled, waits for the device."""
    step = step_of(subject, sliding_window_size=5)
    ran = 0
    for sizes in ({}, V4):
        made = subject.tensors(**sizes)
        tokens, pool = made[0].shape[2], made[2].shape[2]
        packed = [offsets_of(0, 3, tokens), offsets_of(0, 1, pool)]
        dense = subject.sees == "indices" and subject.most_slots >= pool
        for indices in [made[4], None] if dense else [made[4]]:
            for offsets in ([], packed):
                step(*made[:4], indices, *offsets)
                with no_waiting():
                    step(*made[:4], indices, *offsets)
                ran += 1
    torch._dynamo.reset()
    made = subject.tensors()
    compiled = torch.compile(call_forward(subject), fullgraph=True, backend="aot_eager")
    run_compiled(subject, compiled, made)
    with no_waiting():
        run_compiled(subject, compiled, made)
    return f"{ran} calls and a compiled one"


def repeats(subject: Subject) -> str:
    """G27, and the same at V4's heads: ten deterministic runs are equal, or refused."""
    step = step_of(subject, sliding_window_size=5)
    if not subject.repeatable:
        return refused(subject, step)
    with deterministic():
        for sizes in ({"batch": 3}, {**V4, "batch": 2}):
            made = subject.tensors(**sizes)
            first = step(*made)
            for _ in range(9):
                assert bits_equal(step(*made), first), sizes
    made = subject.tensors(batch=3)
    output = call_forward(subject)(*made)
    with deterministic():  # switched on between forward and backward
        runs = [subject.gradients(output, made[:4], retain_graph=True) for _ in range(3)]
    assert all(bits_equal(run, runs[0]) for run in runs)
    return "10 runs, and switched on before the backward"


def refusal_of(run: Callable[[], object]) -> str:
    """The message of a refusal, empty if it ran."""
    try:
        run()
    except BackendRefused as error:
        return str(error)
    return ""


def refused(subject: Subject, step: Step) -> str:
    """A backend that cannot repeat itself says so, also once its forward has run."""
    made = subject.tensors()
    output = call_forward(subject)(*made)
    with deterministic():
        for run in (partial(step, *made), partial(subject.gradients, output, made[:4])):
            assert "deterministic" in refusal_of(run)
    return "refused with a reason, and when switched on before the backward"


def neighbours(subject: Subject) -> str:
    """Whether a document's bits depend on its batch slot, or on what it is packed with."""
    found = []
    for name, sizes in (("D64", {"heads": 64}), ("V4", V4)):
        made = subject.tensors(**sizes, batch=3, dtype=torch.bfloat16)
        step = step_of(subject, sliding_window_size=5)
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


def autocast(subject: Subject) -> str:
    made = subject.tensors(dtype=torch.float32)
    for compiled in (False, True):
        torch._dynamo.reset()
        call: Any = partial(attention, sliding_window_size=5, return_lse=True, **subject.forced())
        if compiled:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        with torch.autocast("cuda", dtype=torch.bfloat16), record_receipts() as receipts:
            seen = subject.seen(made[2], made[4])
            output, lse = call(*made[:2], attention_sink=made[3], **seen)
            gradients = subject.gradients(output, made[:4])
        assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        ran = {(item.spec.dtype, item.spec.sink) for item in receipts}
        assert ran == {("bfloat16", "float32")}, ran
    return "query and KV in bf16, sink and gradients in fp32"


CHECKS: dict[str, list[Callable[[Subject], str]]] = {
    "compile": [partial(compile_lengths, dynamic=None), partial(compile_lengths, dynamic=True),
                compile_layouts],
    "graphs": [graph_plain, graph_compiled],
    "waits": [waits],
    "repeats": [repeats, neighbours],
    "autocast": [autocast],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--backend", nargs="+", default=["triton", "eager"], choices=list(SUBJECTS)
    )
    parser.add_argument("--only", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    wanted = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    for subject in map(SUBJECTS.__getitem__, wanted.backend):
        for group in wanted.only:
            for check in CHECKS[group]:
                name = getattr(check, "__name__", "") or f"compile_lengths {check.keywords}"
                begun = time.perf_counter()
                try:
                    verdict = f"ok    {check(subject)}"
                except Exception as error:
                    failed += 1
                    traceback.print_exc()
                    verdict = f"FAIL  {type(error).__name__}: {str(error)[:300]}"
                took = time.perf_counter() - begun
                print(f"{subject.name:20} {name:32} {took:5.1f} s  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
