"""The plug-in interface: what a backend package provides.

A backend package exposes an instance of a ``Backend`` subclass through the entry-point group
``csa_dispatch.backends``. Importing the package must not import its dependency (triton,
attn_gym, flash_attn, ...): ``probe`` looks for it and ``forward``/``backward`` load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .call import Call, Gradients
from .capabilities import Capabilities, Claims
from .reasons import Reason

if TYPE_CHECKING:
    from torch import Tensor

    from .call_spec import CallSpec

ENTRY_POINT_GROUP = "csa_dispatch.backends"


class Availability(NamedTuple):
    """Whether a backend's dependency is here.

    Attributes:
        version: what runs, e.g. ``"triton 3.6.0"``.
        reason: why it cannot run on this machine at all, or None when it can.
    """

    version: str = ""
    reason: Reason | None = None


class Operation:
    """A backend's implementation of an operation beside attention; subclass it.

    Attributes:
        forward_capabilities: what ``forward`` supports, of the operation's own Claims class.
        backward_capabilities: what ``backward`` supports, or None when there is none.
        evidence: what has been shown to work, as ``Backend.evidence``.
    """

    evidence: str = "verified"
    forward_capabilities: Claims
    backward_capabilities: Claims | None = None

    def forward(self, call: Any) -> Any:
        """Run the operation; what it takes and returns is the operation's contract."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, call: Any, *saved: Any) -> Any:
        """Run the backward, where the operation has one."""
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def notes(self, spec: Any) -> tuple[str, ...]:
        """What a reader of ``explain`` should know of this call."""
        del spec
        return ()


class Backend:
    """One implementation of attention; subclass it and set the attributes.

    Attributes:
        name: what ``backend=`` and policies call it.
        summary: one line for the support table.
        forward_capabilities: what ``forward`` supports.
        backward_capabilities: what ``backward`` supports, or None when there is none. It is
            asked with the same CallSpec. Any backward works with any forward: the contract
            between them is the output and the sink-inclusive natural-log lse alone.
        evidence: what has been shown to work: "verified", "lowered" or "contract-tested".
        backward_uses_lse: whether ``backward`` takes the probabilities as ``exp(z - lse)`` of the
            lse it is given, so that it can differentiate some of a softmax's keys, as
            ``attention_with_window_lse`` wants, and leaves out rows whose lse is +inf, as context
            parallelism wants; False when it works them out anew.
        operations: operations beside attention that it implements, by name, e.g.
            ``{"lightning_indexer": MyIndexer()}``.
    """

    name: str
    summary: str = ""
    forward_capabilities: Capabilities
    backward_capabilities: Capabilities | None = None
    evidence: str = "verified"
    backward_uses_lse: bool = False
    operations: Mapping[str, Operation] = MappingProxyType({})

    def implementation(self, operation: str) -> Backend | Operation | None:
        """What runs ``operation``: the backend itself for attention; None when nothing does."""
        return self if operation == "attention" else self.operations.get(operation)

    def probe(self) -> Availability:
        """Look for the dependency, cheaply and without importing it where that is possible.

        Called once a process. Never raises for a missing or broken dependency: it says so.
        """
        return Availability()

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Compute output and lse.

        Returns:
            output: shape, dtype and device of ``call.query``, allocated like
                ``torch.empty_like(call.query)`` so that its memory order follows the query's.
            lse: ``[B, H, T]`` contiguous, natural log, the sink included; fp32 (fp64 for fp64
                queries).

        A row that sees no key: output 0, lse the sink (or -inf).
        """
        raise NotImplementedError(f"backend {self.name!r} has no forward")

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        """Compute the gradients asked for by ``needs`` (query, local_kv, sparse_kv, sink).

        ``output`` and ``lse`` come from any backend's forward. ``grad_output`` has arbitrary
        strides, expanded included. A gradient that was not asked for is None and costs nothing
        where that is possible. Rows that see no key contribute 0 whatever grad_output holds.
        """
        raise NotImplementedError(f"backend {self.name!r} has no backward")

    def notes(self, spec: CallSpec) -> tuple[str, ...]:
        """What a reader of ``explain`` should know of this call, e.g. a copy that is made."""
        del spec
        return ()
