"""Backends that break the contract otherwise than by wrong numbers, one fault each."""

from __future__ import annotations

import torch
from torch import Tensor

from csa_dispatch import (
    FALSE,
    Availability,
    BackendRefused,
    Call,
    CallSpec,
    Capabilities,
    Gradients,
    OneOf,
    Reason,
    attention,
)
from csa_dispatch.testing import PlainBackend


class Broken(PlainBackend):
    """The operation without a fault in its numbers, under its class's name."""

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__


class ClaimsToUseTheLse(Broken):
    """Works the probabilities out anew all the same."""

    backward_uses_lse = True


class WritesItsInputs(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        results = super().forward(call)
        call.query.mul_(call.scale)
        return results


class WritesAndRestores(Broken):
    """What it wrote is put back, but another stream may have read it."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        kept = call.local_kv.clone()
        call.local_kv.zero_()
        call.local_kv.copy_(kept)
        return super().forward(call)


class WritesTheUpstreamGradient(Broken):
    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        found = super().backward(call, output, lse, grad_output, needs)
        grad_output[0, 0, 0, 0] = 0
        return found


class WritesTheSavedOutput(Broken):
    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        found = super().backward(call, output, lse, grad_output, needs)
        output.mul_(2)
        return found


class WritesPastTheEnd(Broken):
    """A store without its mask: one element after the query's last."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        query = call.query
        last = sum(
            (size - 1) * step for size, step in zip(query.shape, query.stride(), strict=True)
        )
        torch.as_strided(query, (1,), (1,), query.storage_offset() + last + 1).zero_()
        return super().forward(call)


class LiesAboutDeterminism(Broken):
    """The order of atomic additions, in miniature."""

    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        found = super().backward(call, output, lse, grad_output, needs)
        if found.local_kv is not None:
            noise = 1 + 1e-7 * torch.rand((), dtype=torch.float64)
            found = found._replace(local_kv=(found.local_kv * noise).to(found.local_kv.dtype))
        return found


class WrongStrides(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        return output.transpose(1, 2).contiguous().transpose(1, 2), lse


class LseNotContiguous(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        return output, lse.mT.contiguous().mT


class WrongDtype(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        return output.float(), lse


class SinkGradientInTheQuerysDtype(Broken):
    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        found = super().backward(call, output, lse, grad_output, needs)
        sink = found.attention_sink
        return found._replace(attention_sink=None if sink is None else sink.to(call.query.dtype))


class KeepsTheGraph(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        return output.requires_grad_(), lse


class LeavesSpareRowsUnwritten(Broken):
    """Rows without keys are skipped, and hold what ``empty_like`` gave."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        fresh = torch.empty_like(call.query)
        empty = (output == 0).all(-1, keepdim=True)
        return fresh.copy_(torch.where(empty, fresh, output)), lse


class GivesGradientsNobodyAsked(Broken):
    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        every = (True, True, call.sparse_kv is not None, call.attention_sink is not None)
        return super().backward(call, output, lse, grad_output, every)


class ReturnsTheUpstreamGradient(Broken):
    """Saves memory: dquery goes where the upstream gradient was."""

    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        found = super().backward(call, output, lse, grad_output, needs)
        if found.query is not None and grad_output.is_contiguous():
            found = found._replace(query=grad_output.copy_(found.query))
        return found


class KeepsStateOfItsForward(Broken):
    """Its backward needs what its own last forward left behind."""

    _kept = 0

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        self._kept = output.data_ptr()
        return output, lse

    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        if self._kept != output.data_ptr():
            raise RuntimeError("not the output of the last forward")
        return super().backward(call, output, lse, grad_output, needs)


class AssumesContiguous(Broken):
    """Reads the upstream gradient as if it were contiguous."""

    def backward(self, call, output, lse, grad_output, needs) -> Gradients:
        flat = torch.empty(grad_output.shape, device="meta")
        room = grad_output.untyped_storage().nbytes() // grad_output.element_size()
        if grad_output.storage_offset() + flat.numel() <= room:
            grad_output = grad_output.as_strided(flat.shape, flat.stride())
        return super().backward(call, output, lse, grad_output, needs)


class LaundersNan(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = super().forward(call)
        return output.nan_to_num(0.0), lse.nan_to_num(0.0, torch.inf, -torch.inf)


class DelegatesToEager(Broken):
    """Its name is on the receipt, but the work is eager's."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        output, lse = attention(
            *call[:5],
            sliding_window_size=call.sliding_window_size,
            compress_ratio=call.compress_ratio,
            scale=call.scale,
            return_lse=True,
            backend="eager",
        )
        return output, lse


class ClaimsEveryHeadDim(Broken):
    """Claims all head dims; its kernel has tiles of 16 columns."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.query.shape[-1] % 16:
            raise RuntimeError("no kernel for this head_dim")
        return super().forward(call)


class RefusesWhatItClaims(Broken):
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.doc_ids is not None:
            reason = Reason("documents", "doc_ids", "cu_seqlens", "")
            raise BackendRefused("no", {self.name: (reason,)})
        return super().forward(call)


class CallsItsOwnValuesOutside(Broken):
    """Was widened to float64, and the list of what is outside forgotten."""

    forward_capabilities = Capabilities(
        dtype=OneOf(("float64", "float32"), others=("float64", "bfloat16"))
    )


class UndocumentedPredicate(Broken):
    forward_capabilities = Capabilities(predicates=(lambda spec: None,))


class RemedyForNoBound(Broken):
    forward_capabilities = Capabilities(remedies=(("head_dims", "Pad to 64."),))


class NotesAreOneString(Broken):
    def notes(self, spec: CallSpec):
        return "copies everything"


class IsNotHere(Broken):
    def probe(self) -> Availability:
        return Availability("", Reason("availability", "not installed", "a GPU", ""))


class RaisesInProbe(Broken):
    def probe(self) -> Availability:
        raise ImportError("libcuda.so.1")


class ClaimsNothingHere(Broken):
    forward_capabilities = Capabilities(device_type=OneOf(("cuda",), others=("cpu",)))
    backward_capabilities = forward_capabilities


class Accepts(OneOf):
    """A bound that refuses nothing."""

    def __contains__(self, value: object) -> bool:
        return True


class ClaimsTooMuch(Broken):
    """Says float32 alone, and refuses nothing."""

    forward_capabilities = Capabilities(dtype=Accepts(("float32",), others=("bfloat16",)))
    backward_capabilities = forward_capabilities


class NotTraceable(Broken):
    """Without determinism and tracing, and honest about both."""

    forward_capabilities = Capabilities(deterministic=FALSE, tracing=FALSE)
    backward_capabilities = forward_capabilities


class ForwardOnly(Broken):
    backward_capabilities = None


class ForwardHere(Broken):
    """With a backward, on another device."""

    backward_capabilities = Capabilities(device_type=OneOf(("npu",), others=("cpu",)))


class BackwardOnly(Broken):
    forward_capabilities = Capabilities(device_type=OneOf(("npu",), others=("cpu",)))

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(self.name)


def sixteen_heads_of_64(spec: CallSpec) -> Reason | None:
    """16 heads of 64 on a CPU."""
    if spec.device_type != "cpu" or (spec.heads, spec.head_dim) == (16, 64):
        return None
    return Reason("sizes", f"{spec.heads} heads of {spec.head_dim}", "16 of 64", "Use eager.")


class PickyAndWrong(WritesPastTheEnd, WritesItsInputs, WrongStrides):
    """Claims sizes by a predicate alone; what it runs breaks three promises."""

    forward_capabilities = Capabilities(predicates=(sixteen_heads_of_64,))
    backward_capabilities = forward_capabilities


class ReturnsNothing(Broken):
    def forward(self, call: Call):
        super().forward(call)


class GivesThreeGradients(Broken):
    def backward(self, call, output, lse, grad_output, needs):
        return tuple(super().backward(call, output, lse, grad_output, needs))[:3]


class ProbesNothing(Broken):
    def probe(self):
        return None


class ClaimsNone(Broken):
    forward_capabilities = None  # pyright: ignore[reportAssignmentType]


class ClaimsAString(Broken):
    forward_capabilities = Capabilities(dtype="float32")  # pyright: ignore[reportArgumentType]


def looks_up(spec: CallSpec) -> Reason | None:
    """Known devices."""
    return {}[spec.device_type]


class RaisesInAPredicate(Broken):
    forward_capabilities = Capabilities(predicates=(looks_up,))
