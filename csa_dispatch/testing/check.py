"""Check one case: run it, and compare everything that comes back with the oracle's."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from csa_dispatch.api import attention
from csa_dispatch.backend import Backend
from csa_dispatch.call import Call, Gradients
from csa_dispatch.call_spec import GRADIENT_INPUTS
from csa_dispatch.reasons import BackendRefused
from csa_dispatch.wording import a_kind

from .budgets import Target, TensorVerdict, gradient_tensors, judge
from .cases import Case, Inputs, build, to_call
from .targets import targets


class Outcome(NamedTuple):
    """What one run gave, in BHSD layout; a gradient is None when it was not asked for."""

    output: Tensor
    lse: Tensor
    gradients: Gradients


Run = Callable[[Inputs], Outcome]
"""Runs forward and backward for some inputs; ``backend_run`` and ``attention_run`` make them."""


class Reference(NamedTuple):
    """A case's data and what must come of it: made once, compared with by many backends."""

    inputs: Inputs
    call: Call
    targets: dict[str, Target]


class CellResult(NamedTuple):
    """How one case ended.

    Attributes:
        name: the case's.
        status: "pass", "fail", or "unsupported" when the run refused with Reasons.
        verdicts: one for each tensor compared.
        message: why not, empty for a pass.
    """

    name: str
    status: str
    verdicts: tuple[TensorVerdict, ...] = ()
    message: str = ""

    @property
    def share(self) -> float:
        """The largest share of budget used by any tensor."""
        return max((verdict.share for verdict in self.verdicts), default=0.0)


def reference_for(case: Case, device: torch.device | str = "cpu") -> Reference:
    """Build ``case`` on ``device`` and work out its targets there."""
    inputs = build(case, device)
    call = to_call(inputs)
    wanted = targets(call, inputs.grad_output, gradients=case.differentiable)
    return Reference(inputs, call, wanted)


def check_case(
    case: Case,
    run: Run,
    *,
    device: torch.device | str = "cpu",
    reference: Reference | None = None,
) -> CellResult:
    """Run ``case`` and judge output, lse and the gradients it asks for.

    A deterministic case runs twice under torch's deterministic algorithms and must repeat
    itself bit for bit. What ``run`` raises is a failure with the error as its message.

    Args:
        case: what to run.
        run: the implementation.
        device: where, when no reference is given.
        reference: ``reference_for(case, device)``, to share it between implementations.
    """
    reference = reference or reference_for(case, device)
    try:
        with deterministic_algorithms(case.deterministic):
            outcome = run(reference.inputs)
            again = run(reference.inputs) if case.deterministic else outcome
    except BackendRefused as refusal:
        return CellResult(case.name, "unsupported", (), str(refusal))
    except Exception as error:
        return CellResult(case.name, "fail", (), f"{type(error).__name__}: {error}")
    verdicts = tuple(judge_outcome(reference, outcome))
    messages = [f"{item.name}: {item.message}" for item in verdicts if not item.passed]
    messages += gradient_faults(reference, outcome) + layout_faults(reference, outcome)
    if not identical(outcome, again):
        messages.append("two deterministic runs differ")
    return CellResult(case.name, "fail" if messages else "pass", verdicts, "; ".join(messages))


def judge_outcome(reference: Reference, outcome: Outcome) -> Iterator[TensorVerdict]:
    """The verdict on each tensor that came back."""
    found = {"output": outcome.output, "lse": outcome.lse, **gradient_tensors(outcome.gradients)}
    for name, target in reference.targets.items():
        tensor = found[name]
        if tensor is not None:
            yield judge(target, tensor)


def gradient_faults(reference: Reference, outcome: Outcome) -> list[str]:
    """Gradients that are missing, and those that nobody asked for."""
    needs = reference.inputs.needs_grad
    return [
        f"gradient of {name} is {'missing' if wanted else 'not asked for'}"
        for name, wanted, gradient in zip(GRADIENT_INPUTS, needs, outcome.gradients, strict=True)
        if wanted != (gradient is not None)
    ]


def layout_faults(reference: Reference, outcome: Outcome) -> list[str]:
    """Results laid out otherwise than promised."""
    faults = []
    promised = torch.empty_like(reference.inputs.query)
    if _steps(outcome.output) != _steps(promised):
        strides = f"{outcome.output.stride()}, promised {promised.stride()}"
        faults.append(f"output has strides {strides}")
    if not outcome.lse.is_contiguous():
        faults.append(f"lse has strides {outcome.lse.stride()}, promised contiguous")
    return faults


def _steps(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element: of others they mean nothing."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def identical(one: Outcome, other: Outcome) -> bool:
    """Whether two runs gave the same bits."""
    pairs = zip(
        (one.output, one.lse, *one.gradients),
        (other.output, other.lse, *other.gradients),
        strict=True,
    )
    return all(a is b or torch.equal(bits(a), bits(b)) for a, b in pairs if a is not None)


def bits(tensor: Tensor | None) -> Tensor:
    """The bytes of a tensor, by which NaN equals NaN."""
    assert tensor is not None
    return tensor.detach().contiguous().view(torch.uint8)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Torch's deterministic algorithms switched on in the block, if ``wanted``."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


_FRAMES = 3
"""Innermost frames of a backend's traceback that a report shows."""


def innermost(error: BaseException) -> str:
    """Where an error was raised: its innermost frames, the last one first."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in reversed(frames)
    )


def backend_run(forward: Backend, backward: Backend | None = None) -> Run:
    """Run a backend's own functions, without the dispatcher; ``backward`` is ``forward``'s."""
    reverse = backward or forward

    def run(inputs: Inputs) -> Outcome:
        call, needs = to_call(inputs), inputs.needs_grad
        output, lse = run_forward(forward, call)
        if not any(needs):
            return Outcome(output, lse, Gradients(None, None, None, None))
        gradients = run_backward(reverse, call, output, lse, inputs.grad_output, needs)
        return Outcome(output, lse, gradients)

    return run


def run_forward(backend: Backend, call: Call) -> tuple[Tensor, Tensor]:
    """A backend's forward.

    Raises:
        TypeError: it returned something else than output and lse.
    """
    found: object = backend.forward(call)
    match found:
        case (Tensor() as output, Tensor() as lse):
            return output, lse
    raise TypeError(f"forward returned {_outline(found)}; it must return (output, lse), tensors")


def run_backward(
    backend: Backend,
    call: Call,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """A backend's backward.

    Raises:
        TypeError: it returned something else than four gradients.
    """
    found: object = backend.backward(call, output, lse, grad_output, needs)
    match found:
        case (_, _, _, _) if all(item is None or isinstance(item, Tensor) for item in found):
            return Gradients(*found)
    raise TypeError(
        f"backward returned {_outline(found)}; it must return Gradients of four tensors or None"
    )


def _outline(found: object) -> str:
    """What something is, in a few words: types alone."""
    if isinstance(found, tuple):
        return f"({', '.join(type(item).__name__ for item in found)})"
    return a_kind(found)


def attention_run(
    backend: str | None = None, backward_backend: str | None = None, layout: str = "BHSD"
) -> Run:
    """Run ``csa_dispatch.attention`` and autograd, forced to a backend, in any layout."""

    def run(inputs: Inputs) -> Outcome:
        output, lse = attend(
            inputs, backend=backend, backward_backend=backward_backend, layout=layout
        )
        tensors = [getattr(inputs, name) for name in GRADIENT_INPUTS]
        leaves = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(output, leaves, inputs.grad_output) if leaves else ())
        gradients = [next(found) if wanted else None for wanted in inputs.needs_grad]
        return Outcome(output.detach(), lse, Gradients(*gradients))

    return run


_TO_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "BHSD": lambda rows: rows,
    "BSHD": lambda rows: rows.transpose(1, 2),
    "SBHD": lambda rows: rows.permute(2, 0, 1, 3),
    "THD": lambda rows: rows[0].transpose(0, 1),
}
_FROM_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "BHSD": lambda rows: rows,
    "BSHD": lambda rows: rows.transpose(1, 2),
    "SBHD": lambda rows: rows.permute(1, 2, 0, 3),
    "THD": lambda rows: rows.transpose(0, 1)[None],
}


def attend(
    inputs: Inputs,
    *,
    backend: str | None = None,
    backward_backend: str | None = None,
    layout: str = "BHSD",
) -> tuple[Tensor, Tensor]:
    """Call ``attention()`` with BHSD inputs in ``layout``; output and lse come back in BHSD.

    "THD" needs a batch of one.
    """
    there, back = _TO_LAYOUT[layout], _FROM_LAYOUT[layout]
    flat = layout == "THD"

    def table(tensor: Tensor | None) -> Tensor | None:
        return tensor[0] if flat and tensor is not None else tensor

    output, lse = attention(
        there(inputs.query),
        there(inputs.local_kv),
        None if inputs.sparse_kv is None else there(inputs.sparse_kv),
        table(inputs.kv_indices),
        inputs.attention_sink,
        sliding_window_size=inputs.sliding_window_size,
        cu_seqlens=inputs.cu_seqlens,
        cu_seqlens_k=inputs.cu_seqlens_k,
        scale=inputs.scale,
        doc_ids=table(inputs.doc_ids),
        compress_ratio=inputs.compress_ratio,
        layout=layout,
        return_lse=True,
        backend=backend,
        backward_backend=backward_backend,
    )
    return back(output), lse[None] if flat else lse
