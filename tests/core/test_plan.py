"""Plans: resolved once, picklable, verified on use and never re-decided."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from csa_dispatch import (
    BackendRefused,
    CallSpec,
    Capabilities,
    IndexerSpec,
    Kind,
    OneOf,
    Plan,
    attention,
    explain,
    record_receipts,
    resolve,
    use_backend,
    use_policy,
)
from csa_dispatch.policy import parse_policy
from tests.core.probes import WindowBackend, inputs


def test_plan_computes_what_attention_does_and_survives_pickle_and_json() -> None:
    made = inputs(grad=True)
    plan = resolve(*made, sliding_window_size=4)
    restored = [
        pickle.loads(pickle.dumps(plan)),
        Plan.from_dict(json.loads(json.dumps(plan.to_dict()))),
    ]
    expected = attention(*made, sliding_window_size=4)
    for item in restored:
        assert item == plan
        output, lse = item(*made, sliding_window_size=4, return_lse=True)
        assert torch.equal(output, expected)
        assert lse.shape == (1, 4, 8)
        output.sum().backward()


def test_plan_is_not_re_decided_by_context_or_other_sizes(registered: Any) -> None:
    registered(WindowBackend("one"))
    plan = resolve(
        CallSpec(kind=Kind.WINDOW, dtype="float32", heads=4, head_dim=16), backend="one"
    )
    for tokens in (8, 12):
        made = inputs(tokens=tokens, grad=True)
        with use_backend("eager"), record_receipts() as receipts:
            plan(made.query, made.local_kv, sliding_window_size=3).sum().backward()
        assert [receipt.backend for receipt in receipts] == ["one", "one"]


def test_plan_refuses_calls_and_hosts_it_does_not_fit(registered: Any) -> None:
    registered(WindowBackend("narrow", Capabilities(head_dim=OneOf((16,)))))
    plan = resolve(inputs().query, inputs().local_kv, backend="narrow")
    other = inputs(head_dim=32)
    with pytest.raises(BackendRefused, match="head_dim is 32; needs 16"):
        plan(other.query, other.local_kv)
    with pytest.raises(TypeError, match="sliding_window_size"):
        plan(inputs().query, inputs().local_kv, sliding_window_size=True)
    elsewhere = Plan(plan.spec, "not_here", "not_here", plan.policy, plan.why)
    assert [reason.field for reason in elsewhere.verify()] == ["availability"]
    with pytest.raises(BackendRefused, match="not installed"):
        elsewhere(inputs().query, inputs().local_kv)


def test_plan_is_frozen_and_malformed_data_is_refused() -> None:
    plan = resolve(inputs().query, inputs().local_kv)
    with pytest.raises(AttributeError):
        plan.forward = "triton"  # pyright: ignore[reportAttributeAccessIssue]
    data = plan.to_dict()
    for key in ("spec", "forward"):
        less = {name: value for name, value in data.items() if name != key}
        with pytest.raises(ValueError, match=f"plan data lacks {key}; it must be"):
            Plan.from_dict(less)
    wrong = ({"forward": 5}, {"backward": None}, {"spec": {**data["spec"], "kv_heads": 3}})
    for change in wrong:
        with pytest.raises(
            ValueError, match=r"plan data is malformed: (forward|backward|kv_heads)"
        ):
            Plan.from_dict({**data, **change})


def test_nothing_eligible_is_no_plan(registered: Any) -> None:
    registered(WindowBackend("narrow", Capabilities(head_dim=OneOf((16,)))))
    with pytest.raises(BackendRefused, match="head_dim is 512"):
        resolve(CallSpec(), backend="narrow")


def test_nothing_of_the_policy_eligible_names_the_rule(registered: Any) -> None:
    registered(WindowBackend("narrow", Capabilities(head_dim=OneOf((16,)))))
    rule = {"prefer": ["narrow"], "why": "it is small"}
    with (
        use_policy(parse_policy({"rule": [rule]}, "here")),
        pytest.raises(BackendRefused) as caught,
    ):
        resolve(CallSpec())
    assert str(caught.value).splitlines()[0] == (
        "no plan: no backend of the policy can run this call (policy rule 1: it is small)."
    )


@pytest.mark.parametrize("function", [explain, resolve])
@pytest.mark.parametrize("query", [None, [1.0], "query"], ids=str)
def test_what_is_no_query_is_refused_as_query(function: Any, query: Any) -> None:
    with pytest.raises(TypeError, match=r"query is \w+; it must be a torch\.Tensor or a CallSpec"):
        function(query)


def test_specs_of_other_operations_have_no_plans() -> None:
    with pytest.raises(TypeError, match=r"query is IndexerSpec; it must be a torch\.Tensor"):
        resolve(IndexerSpec())  # pyright: ignore[reportArgumentType]
