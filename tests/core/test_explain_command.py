"""``csa-dispatch explain`` and ``backends``: every operation, its options, bad ones by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from csa_dispatch import CallSpec, CompressorSpec, IndexerSpec, Kind, Plan, explain, resolve
from csa_dispatch.cli import app
from csa_dispatch.operations import SPECS

ALL = (True,) * 4


def invoke(*arguments: str):
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


def asked(*arguments: str) -> dict[str, Any]:
    result = invoke("explain", *arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "spec"),
    [
        ("", CallSpec(needs_grad=ALL)),
        (
            "--kind window --no-grad",
            CallSpec(kind="window", pool=0, slots=0, index_dtype="none"),  # type: ignore[arg-type]
        ),
        (
            "--kind dense-compressed --heads 8 --documents doc_ids",
            CallSpec(
                kind="dense-compressed",  # type: ignore[arg-type]
                heads=8,
                slots=0,
                index_dtype="none",
                compress_ratio=128,
                documents="doc_ids",
                needs_grad=ALL,
            ),
        ),
        ("--operation lightning_indexer", IndexerSpec()),
        (
            "--operation lightning_indexer --topk 7 --with-past --weights-dtype bfloat16",
            IndexerSpec(topk=7, with_past=True, weights_dtype="bfloat16"),
        ),
        ("--operation compress_kv", CompressorSpec(needs_grad=(True,) * 3)),
        (
            "--operation compress_kv --compress-ratio 128 --no-grad --bias-dtype bfloat16",
            CompressorSpec(compress_ratio=128, overlapping=False, bias_dtype="bfloat16"),
        ),
    ],
)
def test_it_asks_about_the_spec_that_the_options_describe(arguments: str, spec: Any):
    found = asked(*arguments.split(), "--device", "sm_90")
    assert found == json.loads(json.dumps(explain(spec, device="sm_90").to_dict()))
    assert found["operation"] == spec.operation


def test_every_operation_can_be_asked_about():
    for operation in SPECS:
        result = invoke("explain", "--operation", operation, "--device", "sm_90")
        assert result.exit_code == 0
        assert "triton" in result.stdout


def test_a_refusal_shows_its_reasons_and_exits_1():
    result = invoke(
        *("explain", "--operation", "lightning_indexer", "--backend", "cudnn"),
        *("--device", "sm_90", "--heads", "8"),
    )
    assert result.exit_code == 1
    assert "heads is 8; needs 16, 32 or 64 on SM90" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--topk 4", "attention has no --topk"),
        ("--operation lightning_indexer --window 4", "lightning_indexer has no --window"),
        ("--operation lightning_indexer --grad", "lightning_indexer has no --grad"),
        ("--operation compress_kv --heads 4 --kind window", "no --kind, --heads"),
        ("--operation compress_kv --documents doc_ids", "must be none or cu_seqlens"),
        ("--operation lightning_indexer --weights-dtype half", "weights_dtype is 'half'"),
        ("--kind window --slots 5", "--slots is 5; it must be left out with --kind window"),
        ("--kind window --pool 5", "--pool is 5; it must be left out with --kind window"),
        ("--kind window --slots 512", "--slots is 512; it must be left out"),
        ("--kind gather --compress-ratio 4", "--compress-ratio is 4; it must be left out"),
        ("--compress-ratio 4", "--compress-ratio is 4; it must be left out with --kind gather"),
        ("--kind dense-compressed --slots 5", "--slots is 5; it must be left out"),
        ("--operation indexer", "operation is 'indexer'; it must be one of attention"),
        ("--device sm_09", "device is 'sm_09'; it must be a CUDA architecture"),
    ],
)
def test_a_bad_option_is_named_and_exits_2(arguments: str, message: str):
    result = invoke("explain", *arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (IndexerSpec(heads=0), "heads is 0; it must be 1 or more"),
        (IndexerSpec(heads=2.0), r"heads is 2\.0; it must be of type int"),  # type: ignore[arg-type]
        (IndexerSpec(with_past=1), "with_past is 1; it must be of type bool"),  # type: ignore[arg-type]
        (IndexerSpec(dtype="half"), "dtype is 'half'"),
        (IndexerSpec(pool=-1), "pool is -1; it must be 0 or more"),
        (IndexerSpec(documents="cu_seqlens", batch=2), "batch is 2; it must be 1 with cu_seqlens"),
        (CompressorSpec(bias_dtype="float"), "bias_dtype is 'float'"),
        (CompressorSpec(documents="doc_ids"), "documents is 'doc_ids'"),
        (CompressorSpec(needs_grad=(True,)), "needs_grad is"),  # type: ignore[arg-type]
        (IndexerSpec(capability="90"), "capability is '90'; it must be an int"),  # type: ignore[arg-type]
        (CallSpec(capability="90"), "capability is '90'; it must be an int"),  # type: ignore[arg-type]
        (CallSpec(capability=9), "capability is 9; it must be major"),
        (CallSpec(device_type=None), "device_type is None; it must be a string"),  # type: ignore[arg-type]
        (CallSpec(tracing=1), "tracing is 1; it must be a bool"),  # type: ignore[arg-type]
        (CallSpec(kind=Kind.WINDOW, slots=5), "slots is 5; it must be 0 for kind window"),
        (CallSpec(kind=Kind.WINDOW, pool=5), "pool is 5; it must be 0 for kind window"),
        (CallSpec(kind=Kind.WINDOW, index_dtype="int64"), "index_dtype is 'int64'"),
        (CallSpec(kind=Kind.WINDOW, compress_ratio=4), "compress_ratio is 4; it must be 0"),
        (CallSpec(compress_ratio=4), "compress_ratio is 4; it must be 0 for kind gather"),
        (CallSpec(index_dtype="none"), "index_dtype is 'none'; it must be int32 or int64"),
        (CallSpec(tokens=2**31), f"tokens is {2**31}; it must be at most {2**31 - 1}"),
        (CallSpec(pool=2**31), f"pool is {2**31}; it must be at most"),
        (CallSpec(window=2**63), f"window is {2**63}; it must be at most"),
        (CallSpec(tokens=10**5000), "tokens is an int of 16610 bits; it must be at most"),
        (CallSpec(kind=[10**5000]), "kind is too long to write out"),  # type: ignore[arg-type]
        (CallSpec(device_type="cuda:0"), "device_type is 'cuda:0'; it must be a device type"),
        (CallSpec(device_type="foo"), "device_type is 'foo'; it must be a device type"),
        (CallSpec(capability=9999), "capability is 9999; it must be major"),
        (CallSpec(heads=10**5000), "heads is an int of 16610 bits; it must be at most"),
        (CallSpec(slots=2**63), f"slots is {2**63}; it must be at most {2**63 - 1}"),
        (CallSpec(sink="float16"), "sink is 'float16'; it must be none, float32 or bfloat16"),
        (
            CallSpec(kind=Kind.DENSE, compress_ratio=4, slots=5),
            "slots is 5; it must be 0 for kind dense-compressed",
        ),
    ],
)
def test_a_spec_that_describes_no_call_is_refused(spec: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        explain(spec)
    if isinstance(spec, CallSpec):
        with pytest.raises((TypeError, ValueError), match=message):
            resolve(spec)
        with pytest.raises((TypeError, ValueError), match=message):
            resolve(CallSpec(kind=Kind.WINDOW)).verify(spec)


WINDOW = CallSpec(kind=Kind.WINDOW, pool=0, slots=0, compress_ratio=0, index_dtype="none")
DENSE = CallSpec(kind=Kind.DENSE, slots=0, compress_ratio=4, index_dtype="none")


@pytest.mark.parametrize(
    ("spec", "settled"),
    [
        (WINDOW, WINDOW),
        (CallSpec(kind=Kind.WINDOW), WINDOW),
        (CallSpec(kind="window"), WINDOW),  # type: ignore[arg-type]
        (CallSpec(kind=Kind.DENSE, compress_ratio=4), DENSE),
        (CallSpec(kind="dense-compressed", compress_ratio=4), DENSE),  # type: ignore[arg-type]
        (CallSpec(slots=0, pool=0), CallSpec(slots=0, pool=0)),
    ],
    ids=str,
)
def test_fields_that_a_kind_lacks_may_be_left_out(spec: CallSpec, settled: CallSpec):
    decision = explain(spec)
    assert decision.spec == settled
    assert isinstance(decision.spec.kind, Kind)
    plan = resolve(spec)
    assert plan.spec == settled
    assert Plan.from_dict(plan.to_dict()).spec == settled
    assert plan.verify(spec) == ()


def test_a_window_call_is_not_judged_by_slots_that_it_lacks():
    decision = explain(
        CallSpec(kind=Kind.WINDOW, tokens=64), device="sm_90", backend="attention_gym"
    )
    assert decision.forward == "attention_gym"


def test_the_list_of_backends_names_what_they_run_beside_attention():
    lines = invoke("backends").stdout.splitlines()
    assert any("cudnn" in line and "lightning_indexer" in line for line in lines)
    assert not any("fa4" in line and "lightning_indexer" in line for line in lines)
