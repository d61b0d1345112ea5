"""The guard of a Plan's last call: it takes no other call for that one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from csa_dispatch import Plan, memo, resolve
from csa_dispatch.memo import Guard
from csa_dispatch.prepared import Arguments, signature, tensors_plain, undisturbed
from csa_dispatch.transforms import any_autocast
from tests.core.probes import inputs

SCALE = 0.25


class Subclass(Tensor):
    """A tensor with the same metadata that is not plain."""


def base() -> Arguments:
    made = inputs(grad=True)
    return Arguments(
        made.query,
        made.local_kv,
        made.sparse_kv,
        made.kv_indices,
        made.attention_sink,
        None,
        None,
        None,
        1,
        None,
        SCALE,
        "BHSD",
    )


def lazily_negative(tensor: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack((tensor, -tensor), -1).detach()).conj().imag


def shifted(tensor: Tensor) -> Tensor:
    """The same values at an address 4 bytes further."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return (
        memory[1:].view(tensor.shape).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
    )


def restrided(tensor: Tensor) -> Tensor:
    """The same shape over memory in another order."""
    return tensor.detach().mT.contiguous().mT.requires_grad_(tensor.requires_grad)


CHANGES: dict[str, Callable[[Arguments], Arguments]] = {"none": lambda made: made}
for field in ("query", "local_kv", "sparse_kv", "kv_indices", "attention_sink"):
    for name, change in {
        "None": lambda tensor: None,
        "number": lambda tensor: 3,
        "dtype": lambda tensor: tensor.to(
            torch.int32 if tensor.dtype is torch.int64 else torch.float64
        ),
        "longer": lambda tensor: torch.cat((tensor, tensor), -1),
        "one more dimension": lambda tensor: tensor[None],
        "meta": lambda tensor: tensor.to("meta"),
        "Parameter": lambda tensor: torch.nn.Parameter(tensor.detach(), tensor.requires_grad),
        "subclass": lambda tensor: tensor.as_subclass(Subclass),
        "sparse": lambda tensor: tensor.detach().to_sparse(),
        "nested": lambda tensor: torch.nested.nested_tensor([tensor[0].detach()]),
        "copy": lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad),
    }.items():
        CHANGES[f"{field}: {name}"] = lambda made, field=field, change=change: made._replace(
            **{field: change(getattr(made, field))}
        )
    if field != "kv_indices":
        CHANGES[f"{field}: no gradient"] = lambda made, field=field: made._replace(
            **{field: getattr(made, field).detach()}
        )
        CHANGES[f"{field}: negative"] = lambda made, field=field: made._replace(
            **{field: lazily_negative(getattr(made, field))}
        )
    if field in ("query", "local_kv", "sparse_kv"):
        CHANGES[f"{field}: shifted"] = lambda made, field=field: made._replace(
            **{field: shifted(getattr(made, field))}
        )
    if field != "attention_sink":
        CHANGES[f"{field}: restrided"] = lambda made, field=field: made._replace(
            **{field: restrided(getattr(made, field))}
        )
OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)
DOCUMENTS = {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS.clone(), "doc_ids": OFFSETS.clone()}
for field, given in DOCUMENTS.items():
    for name, changed in {
        "given": given,
        "int64": given.long(),
        "longer": torch.cat((given, given)),
        "meta": given.to("meta"),
        "restrided": torch.stack((given, given), -1)[:, 0],
        "copy": given.clone(),
        "number": 3,
    }.items():
        CHANGES[f"{field}: {name}"] = lambda made, field=field, changed=changed: made._replace(
            **{field: changed}
        )
for field, values in {
    "sliding_window_size": (True, 1.0, 2, "1"),
    "compress_ratio": (0, 4, False),
    "scale": (None, 1, 1.0, True, 0.5),
    "layout": ("BSHD", "bhsd", None),
}.items():
    for value in values:
        CHANGES[f"{field}: {value!r}"] = lambda made, field=field, value=value: made._replace(
            **{field: value}
        )


def test_guard_tells_apart_whatever_signatures_do() -> None:
    variants = {name: change(base()) for name, change in CHANGES.items()}
    packed = base()._replace(**DOCUMENTS)
    variants |= {f"packed, {name}": change(packed) for name, change in CHANGES.items()}
    guards = {
        name: Guard.of(variant, None)  # pyright: ignore[reportArgumentType]
        for name, variant in variants.items()
        if is_acceptable(variant)
    }
    assert len(guards) > 100
    for (name, guard), (other, variant) in product(guards.items(), variants.items()):
        if not guard.matches(variant):
            assert name != other, f"{name} does not match itself"
            continue
        assert tensors_plain(variant), f"{name} takes {other}, which is not plain"
        same = signature(variant) == signature(variants[name])
        assert same, f"{name} takes {other} for its own"
    for kind, copied in (("", packed._fields[:5]), ("packed, ", packed._fields[:8])):
        guard = guards[f"{kind}none"]
        recognised = {name for name, variant in variants.items() if guard.matches(variant)}
        same = {f"{kind}{name}" for name in ("none", *(f"{field}: copy" for field in copied))}
        assert recognised == same | {f"{kind}{field}: given" for field in copied[5:]}


def is_acceptable(arguments: Arguments) -> bool:
    """Whether a guard may be made of it: plain, and good enough to have a signature."""
    try:
        hash(signature(arguments))
    except (AttributeError, TypeError, RuntimeError):
        return False
    return tensors_plain(arguments)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "situation",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        Passing,
        torch.autograd.forward_ad.dual_level,
    ],
    ids=["no_grad", "inference_mode", "autocast", "dispatch mode", "forward derivatives"],
)
def test_guarded_call_is_not_recognised_elsewhere(
    situation: Callable[[], AbstractContextManager[object]],
) -> None:
    made = base()
    guard = Guard.of(made, None)  # pyright: ignore[reportArgumentType]
    for around, expected in ((nullcontext, True), (situation, False)):
        with around():
            found = undisturbed() and not any_autocast() and guard.matches(made)
            assert found is expected


@pytest.mark.parametrize("warn_only", [False, True])
def test_guarded_call_is_not_recognised_once_determinism_is_asked(warn_only: bool) -> None:
    made = base()
    guard = Guard.of(made, None)  # pyright: ignore[reportArgumentType]
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert not guard.matches(made)
    finally:
        torch.use_deterministic_algorithms(False)
    assert guard.matches(made)


def guarded(plan: Plan, *tensors: Tensor | None) -> bool:
    """Whether the plan recognises this call by its guard."""
    arguments = Arguments(*tensors, None, None, None, 4, None, None, "BHSD")  # pyright: ignore
    return plan._memo.recall(arguments) is not None


def test_plan_guards_the_call_it_sees_twice_in_a_row() -> None:
    made, other = inputs(), inputs(tokens=12)
    plan = resolve(*made, sliding_window_size=4)
    expected = plan(*made, sliding_window_size=4)
    for _ in range(3):
        plan(*other, sliding_window_size=4)
        plan(*made, sliding_window_size=4)
    assert not guarded(plan, *made), "calls in turns would make a guard each time"
    assert not guarded(plan, *other)
    for _ in range(2):
        assert torch.equal(plan(*made, sliding_window_size=4), expected)
    assert guarded(plan, *made)
    assert not guarded(plan, *other)
    with torch.no_grad():
        assert torch.equal(plan(*made, sliding_window_size=4), expected)


def test_a_guarded_plan_names_nested_tensors() -> None:
    made = inputs()
    plan = resolve(*made, sliding_window_size=4)
    for _ in range(3):
        plan(*made, sliding_window_size=4)
    assert guarded(plan, *made)
    for field in ("query", "local_kv", "sparse_kv", "attention_sink"):
        nested = torch.nested.nested_tensor([getattr(made, field)[:1]])
        with pytest.raises(ValueError, match=f"{field} is nested"):
            plan(*made._replace(**{field: nested}), sliding_window_size=4)


def test_guard_keeps_no_tensor_alive() -> None:
    made = inputs()
    plan = resolve(*made, sliding_window_size=4)
    for _ in range(3):
        plan(*made, sliding_window_size=4)
    assert guarded(plan, *made)
    query = weakref.ref(made.query)
    del made
    gc.collect()
    assert query() is None


def test_without_torchs_guards_plans_go_by_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "_TensorGuards", None)
    made = inputs()
    plan = resolve(*made, sliding_window_size=4)
    results = [plan(*made, sliding_window_size=4) for _ in range(4)]
    assert not guarded(plan, *made)
    assert all(torch.equal(result, results[0]) for result in results)


def test_autocast_calls_are_guarded_too() -> None:
    made = inputs()
    plan = resolve(*made, sliding_window_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [plan(*made, sliding_window_size=4) for _ in range(4)]
        cast = [tensor.bfloat16() for tensor in made[:3]]
        assert guarded(plan, *cast, *made[3:])
    assert all(result.dtype is torch.bfloat16 for result in results)
    assert plan(*made, sliding_window_size=4).dtype is torch.float32
