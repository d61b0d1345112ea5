"""Devices of different capability in one process, and plans carried between hosts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import csa_dispatch
from csa_dispatch import BackendRefused, Capabilities, OneOf, explain, resolve, use_policy
from csa_dispatch.call_spec import device_capability
from csa_dispatch.policy import parse_policy
from tests.core.probes import WindowBackend, inputs


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuda:0 is an H100 and cuda:1 a B300, as torch would report them."""
    capabilities = {0: (9, 0), 1: (10, 3)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    device_capability.cache_clear()
    yield
    device_capability.cache_clear()


@pytest.mark.usefixtures("fleet")
def test_each_call_routes_by_its_own_tensors_device(registered: Any) -> None:
    for name, capability in (("hopper", 90), ("blackwell", 103)):
        registered(WindowBackend(name, Capabilities(capability=OneOf((capability,)))))
    policy = parse_policy({"rule": [{"prefer": ["hopper", "blackwell", "eager"]}]}, "fleet")
    with FakeTensorMode(allow_non_fake_inputs=True), use_policy(policy):
        chosen = []
        for index in (0, 1, 0):
            query = torch.empty(1, 4, 8, 16, device=f"cuda:{index}")
            decision = explain(query, torch.empty(1, 1, 8, 16, device=f"cuda:{index}"))
            chosen.append((decision.spec.capability, decision.forward))
    assert chosen == [(90, "hopper"), (103, "blackwell"), (90, "hopper")]


def test_plan_made_elsewhere_verifies_and_refuses_with_reasons(registered: Any) -> None:
    registered(WindowBackend("blackwell", Capabilities(capability=OneOf((103,)))))
    spec = csa_dispatch.CallSpec(
        kind=csa_dispatch.Kind.WINDOW, device_type="cuda", capability=103, slots=0, pool=0
    )
    plan = pickle.loads(pickle.dumps(resolve(spec, backend="blackwell")))
    assert plan.verify() == ()
    here = spec._replace(device_type="cpu", capability=None)
    assert [reason.field for reason in plan.verify(here)] == ["capability"]
    made = inputs()
    with pytest.raises(BackendRefused, match="capability is None; needs 103"):
        plan(made.query, made.local_kv)
