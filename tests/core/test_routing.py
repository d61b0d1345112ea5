"""Policies, decisions, fallback notices and explain."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import csa_dispatch
from csa_dispatch import (
    BackendRefused,
    Between,
    CallSpec,
    Capabilities,
    FallbackWarning,
    Kind,
    OneOf,
    Reason,
    attention,
    explain,
    load_policy,
    resolve,
    use_policy,
)
from csa_dispatch.policy import default_policy, parse_policy
from tests.core.probes import WindowBackend, inputs

HEADS = "[[rule]]\nprefer = ['eager']\nwhen = { heads = "


def policy(*prefer: str, **when: Any) -> Any:
    rules = [{"prefer": list(prefer), "when": when}, {"prefer": ["eager"]}]
    return parse_policy({"name": "test", "rule": rules}, "test policy")


def test_first_matching_rule_decides() -> None:
    rules = [
        {"when": {"head_dim": {"min": 64, "max": 128, "multiple_of": 64}}, "prefer": ["a"]},
        {"when": {"dtype": ["bfloat16", "float16"], "kind": "window"}, "prefer": ["b", "c+d"]},
        {"prefer": ["eager"]},
    ]
    made = parse_policy({"name": "x", "rule": rules}, "x")
    assert made.rule_for(CallSpec(head_dim=128))[0] == 0
    assert made.rule_for(CallSpec(head_dim=96, kind=Kind.WINDOW))[0] == 1
    assert [str(entry) for entry in made.rules[1].prefer] == ["b", "c+d"]
    assert made.rule_for(CallSpec(head_dim=96))[0] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3\nrule = 4", "tables"),
        ("[[rule]]\nprefer = []", "rule 1: prefer is \\[\\]; it must be a non-empty list of"),
        ("[[rule]]\nprefer = 'eager'", "rule 1: prefer is 'eager'; .* list of backend names"),
        ("[[rule]]\nprefer = ['eager']\n[[rule]]\nwhy = 'so'", "rule 2: prefer is missing"),
        (HEADS + "{ min = 9, max = 3 } }", "when.heads.max is 3; it must be at least min, 9"),
        (HEADS + "{ max = -1 } }", "when.heads.max is -1; it must be at least 1, the"),
        (HEADS + "{ multiple_of = 0 } }", "when.heads.multiple_of is 0; it must be 1 or more"),
        (
            HEADS + "{ min = 5, max = 7, multiple_of = 4 } }",
            "it must be a span that holds a multiple of 4",
        ),
        (HEADS + "[] }", "when.heads is \\[\\]; it must be a list of one value"),
        ("[[rule]]\nprefer = ['a+b+c']", "a\\+b\\+c"),
        ("[[rule]]\nprefer = ['eager']\nwhen = { headdim = 3 }", "when.headdim"),
        ("[[rule]]\nprefer = ['eager']\nwhen = { tokens = { low = 3 } }", "unknown keys"),
        ("[[rule]]\nprefer = ['eager']\nwhen = { kind = 'windows' }", "when.kind"),
        ("[[rule]]\nprefer = ['eager']\nelse = 1", "rule 1 has unknown keys \\['else'\\]; known"),
        ("[[rule", "not valid TOML"),
    ],
)
def test_malformed_policy_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_policy(path)
    assert str(path) in str(caught.value)


def test_policy_comes_from_context_over_environment_over_default(
    tmp_path: Path, environment: Any, registered: Any
) -> None:
    for name in ("one", "two"):
        registered(WindowBackend(name))
    spec = CallSpec(kind=Kind.WINDOW)
    assert explain(spec).policy == "default"
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[rule]]\nprefer = ["one"]\n')
    environment("CSA_DISPATCH_POLICY", str(path))
    assert (explain(spec).forward, explain(spec).policy) == ("one", "mine")
    with use_policy(policy("two", "eager")):
        assert (explain(spec).forward, explain(spec).policy) == ("two", "test")
    assert explain(spec).forward == "one"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, FileNotFoundError, "it must be a file that can be read .No such file"),
        ("[[rule", ValueError, "not valid TOML"),
    ],
)
def test_a_policy_of_the_environment_that_cannot_be_read_names_the_variable(
    tmp_path: Path, environment: Any, text: str | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    environment("CSA_DISPATCH_POLICY", str(path))
    with pytest.raises(error, match=f"CSA_DISPATCH_POLICY.*mine.toml.*{message}"):
        explain(CallSpec(kind=Kind.WINDOW))


def test_changed_policy_is_seen_by_the_next_call(registered: Any) -> None:
    registered(WindowBackend("one"))
    made = inputs()
    for expected, chosen in (("one", policy("one")), ("eager", policy("eager"))):
        with use_policy(chosen), csa_dispatch.record_receipts() as receipts:
            attention(made.query, made.local_kv, sliding_window_size=2)
        assert [receipt.backend for receipt in receipts] == [expected]


def test_forward_and_backward_entries_are_one_unit(registered: Any) -> None:
    registered(WindowBackend("forward_only", backward=False))
    registered(WindowBackend("other"))
    spec = CallSpec(kind=Kind.WINDOW, needs_grad=(True, False, False, False))
    with use_policy(policy("forward_only", "forward_only+other", "eager")):
        decision = explain(spec)
        assert (decision.forward, decision.backward) == ("forward_only", "other")
        assert "no backward" in str(decision.refused()["forward_only"][0])
        assert explain(spec._replace(needs_grad=(False,) * 4)).backward is None


def test_errors_and_decisions_count_rules_alike() -> None:
    rules: list[dict[str, Any]] = [
        {"when": {"head_dim": 96}, "prefer": ["eager"]},
        {"prefer": ["eager"]},
    ]
    with use_policy(parse_policy({"rule": rules}, "x")):
        assert explain(CallSpec()).why == "policy rule 2"
    rules[1]["prefer"] = []
    with pytest.raises(ValueError, match="x: rule 2: prefer"):
        parse_policy({"rule": rules}, "x")


def test_predicates_and_all_reasons_are_collected() -> None:
    def even_tokens(spec: CallSpec) -> Reason | None:
        """Tokens: an even number."""
        return None if spec.tokens % 2 == 0 else Reason("even_tokens", "odd", "even", "pad")

    claims = Capabilities(
        dtype=OneOf(("float32",)), head_dim=Between(16, 64, 16), predicates=(even_tokens,)
    )
    fields = [reason.field for reason in claims.reasons(CallSpec(tokens=3))]
    assert fields == ["dtype", "head_dim", "even_tokens"]
    assert claims.reasons(CallSpec(dtype="float32", head_dim=48)) == ()


@pytest.mark.parametrize(
    ("bounds", "error", "text"),
    [
        ((64, 16), ValueError, "high is 16; it must be at least low, 64. Swap"),
        ((0, 8, 0), ValueError, "multiple_of is 0; it must be 1 or more"),
        ((0, 8, -4), ValueError, "multiple_of is -4; it must be 1 or more"),
        ((5, 7, 4), ValueError, "Between is 5 to 7; it must be a span that holds a multiple"),
        ((1.5,), TypeError, r"low is 1\.5; it must be an int"),
        ((None,), TypeError, "low is None; it must be an int"),
        ((0, "8"), TypeError, "high is '8'; it must be an int or None"),
        ((0, 8, True), TypeError, "multiple_of is True; it must be an int"),
    ],
)
def test_bounds_that_no_number_meets_are_refused(
    bounds: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Between(*bounds)


@pytest.mark.parametrize("values", ["cuda", ["cuda"], 64])
def test_a_set_of_values_is_a_tuple(values: Any) -> None:
    with pytest.raises(TypeError, match=r"OneOf's values is .*; it must be a tuple\."):
        OneOf(values)
    with pytest.raises(TypeError, match="OneOf's others is"):
        OneOf(("cpu",), others=values)


@pytest.mark.parametrize(
    "allowed",
    [
        Between(3, 20, 4),
        Between(1, 1),
        Between(0, None, 128),
        Between(16, 512),
        OneOf(("a", "b"), others=("c",)),
        csa_dispatch.FALSE,
    ],
)
def test_claims_contain_their_inside_and_refuse_their_outside(allowed: Any) -> None:
    assert allowed.inside()
    assert all(value in allowed for value in allowed.inside())
    assert not any(value in allowed for value in allowed.outside())
    assert allowed.describe()


def test_fallback_is_noticed_once_forbidden_or_allowed(registered: Any, environment: Any) -> None:
    registered(WindowBackend("fast", Capabilities(head_dim=OneOf((512,)))))
    made = inputs()
    call = {"query": made.query, "local_kv": made.local_kv, "sliding_window_size": 2}
    with use_policy(policy("fast", "eager", device_type="cpu")):
        with pytest.warns(FallbackWarning, match=r"eager runs.*fast: head_dim is 16; needs 512"):
            attention(**call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attention(**call)
            attention(**{**call, "sliding_window_size": 3})
            attention(torch.randn(1, 2, 5, 24), torch.randn(1, 1, 5, 24))  # the same bound
        environment("CSA_DISPATCH_FALLBACK", "error")
        with pytest.raises(BackendRefused, match="FALLBACK=error"):
            attention(**call)
    registered(WindowBackend("faster", Capabilities(head_dim=OneOf((256,)))))
    # A cause that was not noticed before.
    with use_policy(policy("faster", "eager", device_type="cpu")), warnings.catch_warnings():
        environment("CSA_DISPATCH_FALLBACK", "allow")
        warnings.simplefilter("error")
        attention(**call)


def test_backend_for_other_hardware_is_no_fallback(registered: Any, environment: Any) -> None:
    registered(WindowBackend("gpu", Capabilities(device_type=OneOf(("cuda",)))))
    environment("CSA_DISPATCH_FALLBACK", "error")
    made = inputs()
    with use_policy(policy("gpu", "eager", device_type="cpu")):
        attention(made.query, made.local_kv, sliding_window_size=2)


def test_explain_answers_for_real_meta_and_fake_tensors_and_other_devices() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = inputs(grad=True)
    real = explain(*made, sliding_window_size=4)
    assert (real.forward, real.backward) == ("eager", "eager")
    meta = explain(*(tensor.to("meta") for tensor in made), sliding_window_size=4)
    assert meta.spec._replace(device_type="cpu", tracing=False) == real.spec._replace(
        tracing=False
    )
    with FakeTensorMode() as mode:
        fake = explain(*(mode.from_tensor(tensor) for tensor in made), sliding_window_size=4)
    assert fake.spec.tracing
    assert fake.forward == "eager"
    b300 = explain(*made, sliding_window_size=4, device="sm_103")
    assert (b300.spec.device_type, b300.spec.capability) == ("cuda", 103)
    for wrong in ("cuda", "sm90x", "b300!", "sm_", "gpu", "hopper"):
        with pytest.raises(ValueError, match="device is"):
            explain(*made, device=wrong)
    with pytest.raises(TypeError, match="device is 90"):
        explain(*made, device=90)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": "cu_seqlens", "batch": 2}, "batch is 2; it must be 1 with cu_seqlens"),
        ({"kv_heads": 5}, "kv_heads is 5; it must be a divisor of the 64 heads"),
        ({"tokens": 0}, "tokens is 0"),
        ({"slots": -1}, "slots is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float64"),
        ({"documents": "packed"}, "documents is 'packed'"),
        ({"kind": Kind.DENSE}, "compress_ratio is 0; it must be 1 or more"),
        ({"heads": "4"}, "heads is '4'; it must be an int"),
        ({"needs_grad": True}, "needs_grad is True; it must be a bool for each of query"),
    ],
)
def test_specs_of_calls_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    spec = CallSpec(**fields)
    for ask in (explain, resolve):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            ask(spec)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("a", "rule 1 is 'a'; it must be a table"),
        ({"prefer": ["eager"], "when": "a"}, "when is 'a'; it must be a table"),
        ({"prefer": ["eager"], "when": {"heads": {"min": "4"}}}, "when.heads.min is '4'"),
        ({"prefer": ["eager"], "when": {"heads": "64"}}, "when.heads is '64'; it must be of type"),
        ({"prefer": ["eager"], "when": {"dtype": "bf16"}}, "when.dtype is 'bf16'; it must be one"),
        ({"prefer": ["eager"], "when": {"capability": "90"}}, "capability is '90'; it must be of"),
        ({"prefer": ["eager"], "when": {"capability": [90, 9.0]}}, "capability is 9.0; it must"),
        ({"prefer": ["eager"], "when": {"capability": True}}, "capability is True; it must be of"),
        ({"prefer": ["eager"], "when": {"needs_grad": True}}, "needs_grad is True; it must be no"),
        ({"prefer": ["eager"], "when": {"dtype": {"min": 1}}}, "when.dtype is a span; it must be"),
        ({"prefer": ["eager"], "when": {"deterministic": {}}}, "when.deterministic is a span"),
        ({"prefer": ["eager"], "when": {"heads": {}}}, "when.heads is {}; it must be a span of"),
        ({"prefer": ["eager"], "when": {"heads": 0}}, "when.heads is 0; it must be 1 or more"),
        ({"prefer": ["eager"], "when": {"slots": [8, -1]}}, "slots is -1; it must be 0 or more"),
        ({"prefer": ["eager"], "when": {"heads": {"max": 0}}}, "heads.max is 0; it must be at"),
        (
            {"prefer": ["eager"], "when": {"documents": ["none", "packed"]}},
            "when.documents is 'packed'",
        ),
    ],
)
def test_rules_that_could_never_match_are_refused(rule: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_policy({"rule": [rule, {"prefer": ["eager"]}]}, "test policy")


def test_missing_and_unknown_arguments_are_laid_at_the_right_door() -> None:
    query = inputs().query
    for ask in (explain, resolve):
        refused = rf"{ask.__name__}\(CallSpec\) takes no further call arguments; got"
        with pytest.raises(TypeError, match=f"{refused} scale"):
            ask(CallSpec(), scale=1.0)
        with pytest.raises(TypeError, match=f"{refused} tensors"):
            ask(CallSpec(), query)
        with pytest.raises(TypeError, match="return_lse is 'x'"):
            ask(query, inputs().local_kv, sliding_window_size=2, return_lse="x")
        ask(query, inputs().local_kv, sliding_window_size=2, return_lse=True, check_values=True)
        with pytest.raises(TypeError, match=rf"{ask.__name__}\(\): missing .* 'local_kv'"):
            ask(query)
        with pytest.raises(TypeError, match=rf"{ask.__name__}\(\): .* 'windows'"):
            ask(query, inputs().local_kv, windows=3)


def test_decision_reads_well_and_is_json(registered: Any) -> None:
    registered(WindowBackend("narrow", Capabilities(head_dim=OneOf((512,)))))
    with use_policy(policy("narrow", "eager")):
        decision = explain(inputs().query, inputs().local_kv)
    text = str(decision)
    assert text.startswith("forward: eager\n")
    assert "narrow cannot run it:\n  head_dim is 16; needs 512" in text
    assert json.loads(json.dumps(decision.to_dict()))["considered"][0]["eligible"] is False


def test_two_devices_in_one_process_route_by_their_own_capability(registered: Any) -> None:
    registered(WindowBackend("blackwell", Capabilities(capability=OneOf((100, 103)))))
    with use_policy(policy("blackwell", "eager", device_type="cuda")):
        spec = CallSpec(device_type="cuda", capability=100)
        assert explain(spec).forward == "blackwell"
        assert explain(spec._replace(capability=90)).forward == "eager"


def test_default_policy_has_a_rule_for_every_device() -> None:
    for device in ("cpu", "cuda", "xpu", "privateuseone"):
        for capability in (None, 80, 90, 103, 120):
            default_policy().rule_for(CallSpec(device_type=device, capability=capability))


def test_spec_describes_strides_by_the_tensors_themselves() -> None:
    query = torch.randn(1, 4, 8, 16)
    assert csa_dispatch.describe_call(query, query[:, :1]).strides == "aligned"
    odd = torch.randn(1, 4, 8, 17)[..., :16]
    assert csa_dispatch.describe_call(odd, query[:, :1]).strides == "unit"
    swapped = torch.randn(1, 4, 16, 8).mT
    assert csa_dispatch.describe_call(swapped, query[:, :1]).strides == "any"
