"""Operations beside attention: the same forcing, policies, explanations and receipts."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch import (
    Backend,
    BackendRefused,
    CallSpec,
    Capabilities,
    FallbackWarning,
    IndexerCall,
    IndexerCapabilities,
    IndexerSpec,
    OneOf,
    Operation,
    backends,
    explain,
    record_receipts,
    report,
    reset_report,
    use_backend,
    use_policy,
)
from csa_dispatch.cli.backends import backend_data
from csa_dispatch.functional import lightning_indexer
from csa_dispatch.policy import parse_policy


class LastEntries(Operation):
    """Picks the last entries, whatever the scores."""

    def __init__(self, capabilities: IndexerCapabilities | None = None) -> None:
        self.forward_capabilities = capabilities or IndexerCapabilities()

    def forward(self, call: IndexerCall) -> Tensor:
        shape = (call.index_query.shape[0], call.index_query.shape[2], call.topk)
        return torch.full(shape, -1, dtype=torch.int32)

    def notes(self, spec: IndexerSpec) -> tuple[str, ...]:
        return (f"looks at none of {spec.pool} entries",)


class Plugin(Backend):
    """A third party's backend, with or without an indexer."""

    forward_capabilities = Capabilities()

    def __init__(self, name: str, indexer: Operation | None) -> None:
        self.name = name
        self.operations = MappingProxyType({"lightning_indexer": indexer} if indexer else {})


TENSORS = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 16), torch.zeros(1, 8, 2)
CALL: dict[str, Any] = {"topk": 1, "compress_ratio": 4}


def ran(**forced: Any) -> str:
    with record_receipts() as receipts:
        lightning_indexer(*TENSORS, **CALL, **forced)
    (receipt,) = receipts
    assert receipt.direction == "forward"
    assert receipt.spec.operation == "lightning_indexer"
    return receipt.backend


@pytest.fixture
def plugins(registered: Any) -> None:
    registered(Plugin("able", LastEntries()))
    registered(Plugin("other", LastEntries()))
    registered(Plugin("unable", None))
    registered(Plugin("bounded", LastEntries(IndexerCapabilities(heads=OneOf((64,))))))


@pytest.mark.usefixtures("plugins")
def test_precedence_is_argument_context_environment_policy(environment: Any) -> None:
    assert ran() == "eager"
    environment("CSA_DISPATCH_BACKEND", "able")
    assert ran() == "able"
    with use_backend("other"):
        assert ran() == "other"
        assert ran(backend="able") == "able"
        with use_backend("eager"):
            assert ran() == "eager"


@pytest.mark.usefixtures("plugins")
def test_an_argument_that_names_a_backend_without_the_operation_is_refused() -> None:
    with pytest.raises(BackendRefused) as refusal:
        ran(backend="unable")
    (reason,) = refusal.value.reasons["unable"]
    assert reason.field == "operation"
    assert str(reason) == "operation is lightning_indexer; needs attention; Name another backend."


@pytest.mark.usefixtures("plugins")
def test_a_context_or_environment_without_the_operation_leaves_it_to_the_policy(
    environment: Any,
) -> None:
    with use_backend("unable"):
        assert ran() == "eager"
        why = explain(lightning_indexer, *TENSORS, **CALL).why
    assert why.endswith("(use_backend names unable, which has no lightning_indexer)")
    environment("CSA_DISPATCH_BACKEND", "unable")
    assert ran() == "eager"
    assert "environment names unable" in explain(lightning_indexer, *TENSORS, **CALL).why


@pytest.mark.usefixtures("plugins")
def test_a_context_with_the_operation_that_cannot_run_the_call_is_refused() -> None:
    with use_backend("bounded"), pytest.raises(BackendRefused, match="heads is 2; needs 64"):
        ran()


@pytest.mark.usefixtures("plugins")
def test_policies_have_rules_of_the_operation() -> None:
    rules = [
        {"prefer": ["unable"]},
        {"operation": "lightning_indexer", "when": {"topk": {"max": 4}}, "prefer": ["able"]},
        {"operation": "lightning_indexer", "prefer": ["bounded", "other"]},
    ]
    policy = parse_policy({"name": "mine", "rule": rules}, "here")
    with use_policy(policy):
        assert ran() == "able"
        assert explain(lightning_indexer, *TENSORS, **CALL).policy == "mine"
        with pytest.warns(FallbackWarning, match="heads is 2"):
            lightning_indexer(*TENSORS, topk=5, compress_ratio=4)
    with use_policy(parse_policy({"rule": rules[:1]}, "attention alone")):
        assert ran() == "eager"
        assert explain(lightning_indexer, *TENSORS, **CALL).policy == "default"
    with use_policy(parse_policy({"rule": rules[1:]}, "the indexer alone")):
        assert explain(CallSpec()).policy == "default"
        with pytest.raises(ValueError, match="matches this call of lightning_indexer"):
            parse_policy({"rule": rules[1:2]}, "few").rule_for(IndexerSpec(topk=9))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"operation": "indexer"}, "operation is 'indexer'; it must be one of attention"),
        (
            {"operation": "lightning_indexer", "when": {"kv_heads": 1}},
            "kv_heads is not a field of IndexerSpec",
        ),
        ({"when": {"topk": 1}}, "when.topk is not a field of CallSpec"),
    ],
)
def test_a_rule_about_what_is_not_there_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy({"rule": [{**rule, "prefer": ["eager"]}]}, "here")


@pytest.mark.usefixtures("plugins")
def test_explain_takes_calls_and_specs() -> None:
    decision = explain(lightning_indexer, *TENSORS, **CALL, backend="able")
    assert decision.forward == "able"
    assert decision.backward is None
    assert decision.notes == ("able: looks at none of 2 entries",)
    assert decision.to_dict()["operation"] == "lightning_indexer"
    assert explain(IndexerSpec(), device="sm_90").forward == "triton"
    assert explain(IndexerSpec(dtype="float64"), device="sm_90").forward == "eager"
    with pytest.raises(TypeError, match=r"explain\(\): missing a required .*'compress_ratio'"):
        explain(lightning_indexer, *TENSORS, 1)
    with pytest.raises(TypeError, match="one of the functions"):
        explain(torch.relu, *TENSORS)
    with pytest.raises(TypeError, match=r"explain\(IndexerSpec\) takes no further"):
        explain(IndexerSpec(), *TENSORS)


@pytest.mark.usefixtures("plugins")
def test_the_command_lists_operations() -> None:
    rows = backends()
    assert backend_data(rows["able"])["operations"] == ["attention", "lightning_indexer"]
    assert backend_data(rows["unable"])["operations"] == ["attention"]


def test_the_census_counts_it_apart() -> None:
    reset_report()
    ran()
    ran()
    (key,) = report()
    assert (key.operation, key.kind, key.heads, key.head_dim) == (
        "lightning_indexer",
        "none",
        2,
        16,
    )
    assert report()[key] == 2


@pytest.mark.usefixtures("plugins")
def test_compiled_code_keeps_what_was_forced() -> None:
    def block(backend: str) -> Tensor:
        with use_backend(backend):
            return lightning_indexer(*TENSORS, **CALL)

    for name, runs in (("able", "able"), ("unable", "eager")):
        torch.compiler.reset()
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        with record_receipts() as receipts:
            compiled(name)
        assert [receipt.backend for receipt in receipts] == [runs]
        assert receipts[0].spec.tracing
