"""Each limit of flash-attn-4, checked against the real package and against our claims."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from csa_backend_fa4 import backend
from csa_backend_fa4.entry_points import availability

from csa_dispatch import CallSpec, Kind
from csa_dispatch.testing import Boundary, boundaries_for

ROOT = Path(__file__).parents[3]
SPEC = CallSpec(device_type="cuda", capability=100)

REFUSED = [
    ("forward", "float32", {"dtype": "float32"}),
    ("forward", "float64", {"dtype": "float64"}),
    ("forward", "capability 90", {"capability": 90}),
    ("forward", "capability 120", {"capability": 120}),
    ("forward", "129 heads", {"heads": 129}),
    ("backward", "129 heads", {"heads": 129}),
    ("forward", "2 KV heads", {"kv_heads": 2}),
    ("backward", "2 KV heads of 128 query heads", {"kv_heads": 2}),
    ("forward", "head_dim 128", {"head_dim": 128}),
    ("forward", "head_dim 256", {"head_dim": 256}),
    ("forward", "head_dim 576", {"head_dim": 576}),
    ("backward", "deterministic", {"deterministic": True}),
]
"""What flash-attn-4 refuses, and the change to a claimed spec that we refuse for it."""

ACCEPTED = [
    *(("forward", f"{heads} heads") for heads in (1, 7, 65, 127, 128)),
    *(("forward", f"{slots} slots") for slots in (128, 640, 2176, 4096)),
    *((side, name) for side in ("forward", "backward") for name in ("float16", "128 heads")),
    ("forward", "as the adapter calls it"),
    ("forward", "capability 103"),
    ("forward", "sink bfloat16"),
    ("forward", "sink float16"),
    ("forward", "no sink"),
    ("forward", "batch of 3"),
    ("forward", "query head before token"),
    ("forward", "output head before token"),
    ("backward", "as the adapter calls it"),
    ("backward", "chunk of one batch entry"),
]
"""What we claim or give."""

MENDED = [
    ("forward", "0 slots"),
    ("forward", "100 slots"),
    ("forward", "192 slots"),
    ("forward", "sink float64"),
    ("forward", "output expanded"),
    ("forward", "causal window"),
    ("backward", "100 slots"),
    ("backward", "probabilities given though recomputed"),
    ("backward", "probabilities neither given nor recomputed"),
]
"""What flash-attn-4 refuses and the adapter never gives it (``documented`` refuses it too)."""

UNCHECKED = [
    ("forward", "2 KV heads of 128 query heads"),
    ("forward", "int64 slots where int32 ones were compiled"),
    ("forward", "int64 slots, 128 heads"),
    ("forward", "int16 slots, 128 heads"),
    ("forward", "query expanded"),
    ("backward", "int64 slots"),
]
"""What flash-attn-4 takes although its kernels cannot run it: here ours is the only check."""


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], str]:
    """flash-attn-4's own answers, from a process in which it compiles nothing."""
    reason = availability().reason
    if reason is not None:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.fa4.contract"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = (json.loads(line) for line in done.stdout.splitlines())
    return {(direction, name): answer for direction, name, answer in rows}


@pytest.mark.parametrize(("direction", "name", "change"), REFUSED)
def test_what_flash_attn_refuses_we_refuse_with_a_reason(
    direction: str, name: str, change: dict[str, Any], answers: dict[tuple[str, str], str]
):
    assert answers[direction, name].startswith("refused")
    refused_with_a_reason(direction, change)


def refused_with_a_reason(direction: str, change: dict[str, Any]) -> None:
    claims = {"forward": backend.forward_capabilities, "backward": backend.backward_capabilities}
    assert claims[direction].reasons(SPEC) == ()
    (reason,) = claims[direction].reasons(SPEC._replace(**change))
    assert reason.field in change
    assert reason.remedy


@pytest.mark.parametrize("case", ACCEPTED, ids=" ".join)
def test_what_we_claim_flash_attn_accepts(
    case: tuple[str, str], answers: dict[tuple[str, str], str]
):
    assert answers[case] == "accepted"


@pytest.mark.parametrize("case", MENDED, ids=" ".join)
def test_what_the_adapter_mends_flash_attn_would_refuse(
    case: tuple[str, str], answers: dict[tuple[str, str], str]
):
    assert answers[case].startswith("refused")


@pytest.mark.parametrize("case", UNCHECKED, ids=" ".join)
def test_flash_attn_takes_what_its_kernels_cannot_run(
    case: tuple[str, str], answers: dict[tuple[str, str], str]
):
    assert answers[case] == "accepted"


def test_flash_attn_does_not_chunk_two_batch_entries(answers: dict[tuple[str, str], str]):
    assert "unchunked" in answers["backward", "chunk of two batch entries"]


def test_two_kv_heads_are_refused_though_flash_attn_s_forward_takes_them():
    refused_with_a_reason("forward", {"kv_heads": 2})


BOUNDARIES = boundaries_for(
    backend.forward_capabilities,
    backend.backward_capabilities,
    device_type="cuda",
    capability=100,
)


@pytest.mark.parametrize(
    "boundary", BOUNDARIES, ids=lambda item: f"{item.field}={getattr(item.spec, item.field)}"
)
def test_just_outside_each_claim_there_is_a_reason(boundary: Boundary):
    reasons = [
        *backend.forward_capabilities.reasons(boundary.spec),
        *backend.backward_capabilities.reasons(boundary.spec),
    ]
    assert boundary.field in [reason.field for reason in reasons]


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"kind": "window", "pool": 0, "slots": 0, "window": 2048}, True),
        ({"kind": "window", "pool": 0, "slots": 0, "window": 2049}, False),
        ({"kind": "window", "pool": 0, "slots": 0, "window": 10**6, "tokens": 2048}, True),
        ({"kind": "dense-compressed", "slots": 0, "pool": 1920, "compress_ratio": 2}, True),
        ({"kind": "dense-compressed", "slots": 0, "pool": 1921, "compress_ratio": 2}, False),
        ({"kind": "dense-compressed", "slots": 0, "pool": 10**6, "compress_ratio": 4}, True),
        ({"slots": 8192}, True),
    ],
)
def test_kinds_without_indices_run_up_to_2048_rows_a_token(change: dict[str, Any], fits: bool):
    change = {**change, **({"kind": Kind(change["kind"])} if "kind" in change else {})}
    reasons = backend.forward_capabilities.reasons(SPEC._replace(**change))
    assert [reason.field for reason in reasons] == ([] if fits else ["dense_slots_bounded"])
