"""What the fused side claims on GPUs that are not here, and how it calls the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from csa_backend_attention_gym import AttentionGymBackend, adapter, backend, features, fused, sides
from csa_backend_attention_gym.features import Features, triton_cat_takes_dim

import csa_dispatch
from csa_dispatch import Backend, CallSpec, Decision, Kind
from csa_dispatch.testing import Case, build, to_call

NOTHING, ALL = (False,) * 4, (True,) * 4
SPEC = CallSpec(slots=8, needs_grad=NOTHING)
WINDOW = SPEC._replace(kind=Kind.WINDOW, pool=0, slots=0, index_dtype="none")


def decide(spec: CallSpec, device: str, chosen: Backend = backend) -> Decision:
    csa_dispatch.register_backend(chosen, replace=True)
    try:
        return csa_dispatch.explain(spec, device=device, backend="attention_gym")
    finally:
        csa_dispatch.register_backend(backend, replace=True)


def fields(decision: Decision) -> list[str]:
    reasons = decision.refused().get("attention_gym", ())
    assert all(reason.remedy for reason in reasons)
    return [reason.field for reason in reasons]


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch):
    """Pretend that this Triton's ``tl.cat`` takes a dimension, or does not."""

    def pretend(takes_dim: bool) -> None:
        monkeypatch.setattr(sides, "triton_cat_takes_dim", lambda: takes_dim)

    return pretend


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch):
    def pretend(installed: bool) -> None:
        monkeypatch.setattr(sides, "has_cute", lambda: installed)

    pretend(False)
    return pretend


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"slots": 9}, "unrolled_slots"),
        ({"slots": 17, "head_dim": 128}, "unrolled_slots"),
        ({"slots": 512}, "unrolled_slots"),
        ({"window": 242}, "unrolled_window"),
        ({"window": 1024, "head_dim": 64}, "unrolled_window"),
        ({"head_dim": 80}, "head_dim"),
        ({"head_dim": 576}, "head_dim"),
        ({"dtype": "float64"}, "dtype"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"documents": "doc_ids"}, "documents"),
        ({"tokens": 2**17}, "fused_addresses"),
        ({"kind": Kind.DENSE, "slots": 0, "pool": 32, "compress_ratio": 128}, "unrolled_slots"),
    ],
)
def test_on_hopper_what_would_not_compile_or_be_right_has_a_reason(change: dict, field: str):
    if change.get("kind") is Kind.DENSE:
        change = {**change, "index_dtype": "none"}
    assert decide(SPEC, "sm_90").forward == "attention_gym"
    decision = decide(SPEC._replace(**change), "sm_90")
    assert decision.forward is None
    assert field in fields(decision)


def test_the_bound_on_unrolling_is_an_option():
    more = AttentionGymBackend(most_unrolled=64)
    narrow = SPEC._replace(head_dim=128)
    assert decide(narrow._replace(slots=16), "sm_90").forward == "attention_gym"
    assert decide(narrow._replace(slots=64), "sm_90", more).forward == "attention_gym"
    assert fields(decide(narrow._replace(slots=65), "sm_90", more)) == ["unrolled_slots"]


@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
def test_the_backward_of_a_pool_needs_a_triton_that_concatenates(device: str, triton):
    training = SPEC._replace(needs_grad=ALL)
    triton(False)
    assert fields(decide(training, device)) == ["concatenates"]
    assert decide(WINDOW._replace(needs_grad=ALL), device).backward == "attention_gym"
    triton(True)
    assert decide(training, device).backward == "attention_gym"


def test_blackwell_s_kernels_for_one_kv_head_unroll_and_concatenate_nothing(
    triton, flash_attention
):
    triton(False)
    training = SPEC._replace(slots=512, needs_grad=ALL)
    decision = decide(training, "sm_100")
    assert (decision.forward, decision.backward) == ("attention_gym",) * 2
    assert any("shared-KV Triton kernels" in note for note in decision.notes)
    assert fields(decide(training._replace(deterministic=True), "sm_100")) == ["concatenates"]
    for change in ({"dtype": "float16"}, {"heads": 8}, {"heads": 160}):
        assert "unrolled_slots" in fields(decide(training._replace(**change), "sm_100"))


def test_cute_is_taken_where_gather_attn_would_take_it(flash_attention):
    spec = SPEC._replace(slots=512)

    def notes(**change: Any) -> str:
        return " ".join(decide(spec._replace(**change), "sm_103").notes)

    assert "shared-KV Triton kernels" in notes()
    flash_attention(True)
    assert "CuTe kernels" in notes()
    assert "CuTe kernels" in notes(heads=3)
    assert "shared-KV Triton kernels" in notes(deterministic=True)
    assert "shared-KV Triton kernels" in notes(head_dim=128)
    triton_side = AttentionGymBackend(side="triton")
    assert "shared-KV Triton" in " ".join(decide(spec, "sm_103", triton_side).notes)


@pytest.mark.parametrize(
    ("device", "change", "field"),
    [
        ("sm_90", {}, "capability"),
        ("sm_100", {"dtype": "float16"}, "dtype"),
        ("sm_100", {"head_dim": 128}, "head_dim"),
        ("sm_100", {"heads": 129}, "heads"),
        ("sm_100", {"kv_heads": 64}, "kv_heads"),
        ("sm_100", {"deterministic": True}, "deterministic"),
        ("sm_100", {"slots": 0, "window": 0}, "slots"),
    ],
)
def test_a_demanded_cute_side_says_what_it_cannot_run(
    device: str, change: dict, field: str, flash_attention
):
    flash_attention(True)
    demanded = AttentionGymBackend(side="cute")
    assert decide(SPEC, "sm_100", demanded).forward == "attention_gym"
    assert field in fields(decide(SPEC._replace(**change), device, demanded))


def test_a_demanded_cute_side_needs_flash_attention_4(flash_attention):
    assert fields(decide(SPEC, "sm_100", AttentionGymBackend(side="cute"))) == ["availability"]


@pytest.mark.parametrize(
    "options",
    [
        {"side": "best"},
        {"most_unrolled": -1},
        {"most_unrolled": "a"},
        {"most_unrolled": 1.5},
        {"most_unrolled": True},
        {"recompute_p": "no"},
    ],
)
def test_bad_options_are_refused(options: dict):
    name, value = next(iter(options.items()))
    with pytest.raises((TypeError, ValueError), match=rf"{name} is {value!r}; .*\. .+\."):
        AttentionGymBackend(**options)


def test_on_a_cpu_the_reference_runs_as_before():
    spec = SPEC._replace(tokens=64, slots=512, dtype="float64", head_dim=80, needs_grad=ALL)
    decision = decide(spec, "cpu")
    assert (decision.forward, decision.backward) == ("attention_gym",) * 2
    assert any("the reference gathers" in note for note in decision.notes)


@pytest.mark.parametrize(
    ("side", "keeps", "wanted"),
    [
        ("generic", True, {"backend": "triton"}),
        ("shared", True, {"backend": "triton"}),
        ("cute", True, {"backend": "cute", "bwd_recompute_p": False}),
        ("cute", False, {"backend": "cute"}),
    ],
)
def test_the_side_that_explain_names_is_the_one_asked_for(
    side: str, keeps: bool, wanted: dict, monkeypatch: pytest.MonkeyPatch
):
    gym = pytest.importorskip("attn_gym.sparse.gather_attn")
    seen: dict[str, Any] = {}

    def gather_attn(query, local_kv, sparse_kv, kv_indices, sink, **arguments):
        seen.update(arguments, sink=sink, slots=kv_indices)
        lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
        return torch.zeros_like(query), gym.GatherAttnAux(lse=lse)

    monkeypatch.setattr(gym, "gather_attn", gather_attn)
    monkeypatch.setattr(fused, "known_features", lambda: Features("", True, True, keeps))
    call = to_call(build(Case(tokens=6, heads=3, content="scattered", index_dtype="int64")))
    fused.forward(call, side, False)
    assert seen["kernel_options"] == wanted
    assert seen["impl"] == "fused"
    assert seen["sink"].dtype == torch.float32
    assert seen["sink"].isfinite().all()
    rows = 0 if call.sparse_kv is None else call.sparse_kv.shape[2]
    assert ((seen["slots"] >= -1) & (seen["slots"] < rows)).all()


def test_an_older_or_broken_library_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("attn_gym")
    monkeypatch.setattr(adapter, "features", lambda: Features("0.0.9", False, False, False))
    reason = backend.probe().reason
    assert reason is not None
    assert "kernel_options" in reason.required

    def broken() -> Features:
        raise RuntimeError("no such symbol")

    monkeypatch.setattr(adapter, "features", broken)
    reason = backend.probe().reason
    assert reason is not None
    assert reason.actual == "broken (RuntimeError: no such symbol)"


def test_triton_is_looked_at_by_its_text(monkeypatch: pytest.MonkeyPatch):
    for text, takes in (
        ("def cat(input, other, can_reorder=False, _semantic=None):\n", False),
        ("def cat(input, other, can_reorder=False, dim=0, _semantic=None):\n", True),
        ("", False),
    ):
        triton_cat_takes_dim.cache_clear()
        monkeypatch.setattr(features, "_source", lambda *_, text=text: text)
        assert triton_cat_takes_dim() is takes
    triton_cat_takes_dim.cache_clear()
