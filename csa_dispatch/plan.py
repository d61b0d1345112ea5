"""Plans: a decision a layer resolves once and calls without re-deciding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .autograd import needs_of
from .call import Kind
from .call_spec import CallSpec, check_spec, spec_of
from .explain import checked_spec, describe, explain
from .layouts import LAYOUTS
from .memo import Memo
from .policy import Entry
from .prepared import (
    Arguments,
    Prepared,
    autocast_arguments,
    canonical,
    checked_call,
    run,
    run_operator,
    tensors_plain,
    undisturbed,
)
from .reasons import BackendRefused, Reason
from .registry import backends
from .routing import Decision, entry_reasons
from .runner import Runner
from .settings import settings
from .tracing import constant_when_traced
from .transforms import any_autocast
from .validation import check_flag, fail
from .value_checks import check_values as check_values_of
from .wording import a_kind


@constant_when_traced
def _checks_values() -> bool:
    return settings().check_values


@dataclass(frozen=True)
class Plan:
    """A frozen, picklable choice of backends.

    Call it with ``attention()``'s arguments (less backend and backward_backend). Sizes may
    differ from ``spec``'s; each new signature is validated and verified against the chosen
    backends once, never re-decided.

    Attributes:
        spec: the call it was resolved for.
        forward, backward: the chosen backends' names.
        policy, why: where the choice came from.
        versions: ``{name: version}`` of the chosen backends where it was resolved.
    """

    spec: CallSpec
    forward: str
    backward: str
    policy: str
    why: str
    versions: tuple[tuple[str, str], ...] = ()
    _memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    def verify(self, spec: CallSpec | None = None) -> tuple[Reason, ...]:
        """Why this plan cannot run ``spec`` (its own by default) here; empty when it can.

        Raises:
            TypeError, ValueError: ``spec`` is no CallSpec, or describes no call.
        """
        if spec is not None and not isinstance(spec, CallSpec):
            remedy = "describe_call() makes one from the arguments of attention()."
            fail("spec", a_kind(spec), "a CallSpec or None", remedy, TypeError)
        asked = self.spec if spec is None else check_spec(spec)
        return entry_reasons(asked, Entry(self.forward, self.backward))

    def __call__(
        self,
        query: Tensor,
        local_kv: Tensor,
        sparse_kv: Tensor | None = None,
        kv_indices: Tensor | None = None,
        attention_sink: Tensor | None = None,
        *,
        sliding_window_size: int = 512,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        scale: float | None = None,
        doc_ids: Tensor | None = None,
        compress_ratio: int | None = None,
        layout: str = "BHSD",
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``attention()`` on this plan's backends.

        CSA_DISPATCH_CHECK_VALUES holds here too.

        Raises:
            TypeError, ValueError: a bad argument.
            BackendRefused: the chosen backends cannot run this call here; with Reasons.
        """
        arguments = Arguments(
            query,
            local_kv,
            sparse_kv,
            kv_indices,
            attention_sink,
            cu_seqlens,
            cu_seqlens_k,
            doc_ids,
            sliding_window_size,
            compress_ratio,
            scale,
            layout,
        )
        check_flag("return_lse", return_lse)
        if any_autocast():
            arguments = autocast_arguments(arguments)
        eager = undisturbed()
        prepared = self._memo.recall(arguments) if eager else None
        if prepared is None:
            if not (eager and tensors_plain(arguments)):
                call = checked_call(arguments)
                check = _checks_values()
                result = run_operator(arguments, call, self.forward, self.backward, check)
                return result if return_lse else result[0]
            prepared = self._prepare(arguments)
        call = canonical(arguments, prepared.order, prepared.scale)
        if settings().check_values:
            check_values_of(call)
        result = run(prepared, call)
        return result if return_lse else result[0]

    def _prepare(self, arguments: Arguments) -> Prepared:
        try:
            key, prepared = self._memo.find(arguments)
        except (TypeError, RuntimeError):
            checked_call(arguments)
            raise
        if prepared is not None:
            return prepared
        call = checked_call(arguments)
        needs = needs_of(call)
        spec = spec_of(call, needs)
        reasons = self.verify(spec)
        if reasons:
            name = str(Entry(self.forward, self.backward))
            raise BackendRefused(f"the plan for {name} does not fit this call.", {name: reasons})
        backward = self.backward if any(needs) else None
        decision = Decision(spec, self.forward, backward, self.why, self.policy, ())
        order = LAYOUTS[arguments.layout]
        prepared = Prepared(order, call.scale, any(needs), Runner(decision), None)
        self._memo.keep(key, prepared)
        return prepared

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_memo": Memo()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; ``from_dict`` restores it."""
        return {
            "spec": {**self.spec._asdict(), "kind": self.spec.kind.value},
            "forward": self.forward,
            "backward": self.backward,
            "policy": self.policy,
            "why": self.why,
            "versions": dict(self.versions),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        """A plan from ``to_dict``'s data.

        Raises:
            TypeError: it is no dict.
            ValueError: missing or unknown keys, or a value of the wrong type.
        """
        if not isinstance(data, dict):
            remedy = "Pass what Plan.to_dict() returned."
            fail("data", a_kind(data), "a dict", remedy, TypeError)
        keys = ("spec", "forward", "backward", "policy", "why", "versions")
        lacking = [key for key in keys if key not in data]
        if lacking:
            raise ValueError(
                f"plan data lacks {', '.join(lacking)}; it must be what Plan.to_dict() returns. "
                "Resolve the plan anew."
            )
        try:
            spec = dict(data["spec"])
            spec["kind"] = Kind(spec["kind"])
            spec["needs_grad"] = tuple(spec["needs_grad"])
            rest = {key: value for key, value in data.items() if key not in ("spec", "versions")}
            versions = tuple(dict(data["versions"]).items())
            plan = Plan(spec=check_spec(CallSpec(**spec)), versions=versions, **rest)
        except (KeyError, TypeError, ValueError) as error:
            text = str(error).rstrip(".")
            raise ValueError(f"plan data is malformed: {text}. Resolve the plan anew.") from None
        for name in ("forward", "backward", "policy", "why"):
            value = getattr(plan, name)
            if not isinstance(value, str):
                raise ValueError(
                    f"plan data is malformed: {name} is {value!r}; it must be text. "
                    "Resolve the plan anew."
                )
        return plan


def resolve(
    query: Tensor | CallSpec,
    *tensors: Tensor | None,
    backend: str | None = None,
    backward_backend: str | None = None,
    **arguments: object,
) -> Plan:
    """Decide once for calls like this one.

    Takes ``attention()``'s arguments or a CallSpec. When no input needs a gradient the plan
    keeps the chosen forward's own backend for a backward, should one be needed later.

    Raises:
        TypeError, ValueError: as ``attention()``.
        BackendRefused: nothing eligible, or the forced backend cannot run it; with Reasons.
    """
    spec: Any = query
    if isinstance(query, CallSpec):
        spec = checked_spec("resolve", query, tensors, arguments)
    else:
        spec = describe("resolve", query, tensors, arguments)
    decision = explain(spec, backend=backend, backward_backend=backward_backend)
    if decision.forward is None:
        raise BackendRefused(f"no plan: {decision.why}.", decision.refused())
    backward = decision.backward or backward_backend or decision.forward
    names = dict.fromkeys((decision.forward, backward))
    versions = tuple((name, backends()[name].availability.version) for name in names)
    return Plan(spec, decision.forward, backward, decision.policy, decision.why, versions)
