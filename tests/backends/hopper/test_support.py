"""Which calls the Hopper kernels claim, and what is left to the portable ones."""

import pytest
import torch

pytest.importorskip("triton")

from csa_backend_triton import backend, choice, hopper_window
from csa_backend_triton.hopper import supports_backward, supports_forward

from csa_dispatch.call import Call, Kind
from csa_dispatch.call_spec import CallSpec

ALL = (True, True, True, True)
V4 = CallSpec(device_type="cuda", capability=90, needs_grad=ALL)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kind": Kind.WINDOW, "pool": 0, "slots": 0},
        {"heads": 128},
        {"heads": 33},
        {"window": 100, "slots": 70},
        {"index_dtype": "int64"},
        {"sink": "none"},
        {"documents": "cu_seqlens"},
        {"strides": "any"},
        {"batch": 3},
        {"kind": Kind.DENSE, "slots": 0, "compress_ratio": 128},
        {"deterministic": True},
    ],
)
def test_v4_calls_on_hopper_are_taken(change: dict) -> None:
    spec = V4._replace(**change)
    assert supports_forward(spec)
    assert supports_backward(spec)


@pytest.mark.parametrize(
    "change",
    [
        {"capability": 80},
        {"capability": 100},
        {"capability": None},
        {"head_dim": 256},
        {"head_dim": 576},
        {"kv_heads": 64},
        {"dtype": "float32"},
    ],
)
def test_other_calls_are_left_alone(change: dict) -> None:
    spec = V4._replace(**change)
    assert not supports_forward(spec)
    assert not supports_backward(spec)


def test_the_forward_of_few_heads_is_left_to_the_portable_kernel() -> None:
    assert not supports_forward(V4._replace(heads=16))
    assert supports_forward(V4._replace(heads=16, kind=Kind.WINDOW, pool=0, slots=0))
    assert supports_backward(V4._replace(heads=16))
    assert supports_forward(V4._replace(heads=17))
    dense = V4._replace(kind=Kind.DENSE, slots=0, compress_ratio=128)
    assert not supports_backward(dense._replace(heads=16))
    assert supports_backward(dense._replace(heads=17))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"deterministic": True, "kind": Kind.DENSE, "slots": 0, "compress_ratio": 128},
        {"deterministic": True, "tokens": 300_000, "pool": 75_000},  # fp32 sums of 154 MB
        {"needs_grad": (False, False, False, True)},
        {"tokens": 300_000, "pool": 75_000},  # fp32 sums of 768 MB
    ],
)
def test_backwards_it_cannot_run_leave_the_forward_alone(change: dict) -> None:
    spec = V4._replace(**change)
    assert supports_forward(spec)
    assert not supports_backward(spec)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({}, None),
        ({"strides": "unit"}, "query or KV tensor whose rows are not contiguous and 16-byte"),
        ({"strides": "any"}, "query or KV tensor whose rows are not contiguous and 16-byte"),
        ({"strides": "unit", "capability": 80}, None),
        ({"strides": "any", "capability": 80}, "a KV tensor whose last dimension"),
        ({"strides": "unit", "heads": 16}, "query or KV"),  # the backward's
        ({"strides": "unit", "heads": 16, "needs_grad": (False,) * 4}, None),
    ],
)
def test_explain_notes_the_copies_that_are_made(
    change: dict, note: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "is_interpreted", lambda: False)
    choice._hopper.cache_clear()
    notes = backend.notes(V4._replace(**change))
    choice._hopper.cache_clear()
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


NARROW = V4._replace(head_dim=128, slots=128)


def test_gathered_calls_of_128_are_taken() -> None:
    for change in ({}, {"heads": 33}, {"documents": "doc_ids"}, {"batch": 3}):
        assert supports_forward(NARROW._replace(**change))
        assert supports_backward(NARROW._replace(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 32},
        {"kind": Kind.WINDOW, "pool": 0, "slots": 0},
        {"kind": Kind.DENSE, "slots": 0, "compress_ratio": 128},
        {"capability": 100},
        {"kv_heads": 64},
    ],
)
def test_other_calls_of_128_are_left_alone(change: dict) -> None:
    assert not supports_forward(NARROW._replace(**change))
    assert not supports_backward(NARROW._replace(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"deterministic": True},
        {"dtype": "float16"},
        {"tokens": 1_000_000, "pool": 250_000},  # fp32 sums of 640 MB
    ],
)
def test_backwards_of_128_it_cannot_run_leave_the_forward_alone(change: dict) -> None:
    assert supports_forward(NARROW._replace(**change))
    assert not supports_backward(NARROW._replace(**change))


WINDOW = V4._replace(kind=Kind.WINDOW, pool=0, slots=0)


@pytest.mark.parametrize(
    "change", [{}, {"deterministic": True}, {"window": 1}, {"tokens": 1_000_000}]
)
def test_window_only_backwards_of_any_length_are_taken(change: dict) -> None:
    assert supports_backward(WINDOW._replace(**change))


@pytest.mark.parametrize(
    ("change", "forward", "backward"),
    [
        ({}, True, True),
        ({"tokens": 1024}, True, True),
        ({"tokens": 1023}, False, True),
        ({"heads": 16}, True, True),
        ({"heads": 17}, True, True),
        ({"heads": 17, "tokens": 3855}, False, True),
        ({"heads": 4}, True, True),
        ({"heads": 2}, False, True),
        ({"heads": 16, "tokens": 1024}, True, True),
        ({"heads": 16, "tokens": 1023}, False, True),
        ({"tokens": 512}, False, True),
        ({"tokens": 511}, False, False),
        ({"heads": 16, "window": 129}, False, False),
        ({"heads": 16, "window": 0}, False, False),
        ({"heads": 16, "head_dim": 128}, False, False),
    ],
)
def test_where_a_run_of_tokens_shares_its_keys(
    change: dict, forward: bool, backward: bool
) -> None:
    spec = WINDOW._replace(**change)
    shape = (spec.kind, spec.head_dim, spec.window)
    assert hopper_window.takes_forward(*shape, spec.heads, spec.tokens) == forward
    assert hopper_window.takes_backward(*shape, spec.tokens) == backward


def test_a_backward_without_those_kernels_must_fit_its_sums() -> None:
    assert not supports_backward(WINDOW._replace(window=129, tokens=300_000))


@pytest.mark.parametrize("heads", [1, 8, 17, 64, 100, 128])
@pytest.mark.parametrize("runs", [1, 8, 32, 128, 157, 512])
def test_the_programs_of_a_run_share_its_heads(runs: int, heads: int) -> None:
    splits, split_groups = hopper_window.split_heads(runs, heads, 132)
    assert (splits - 1) * split_groups * 4 < heads <= splits * split_groups * 4


def test_short_calls_are_split_until_they_fill_the_card() -> None:
    assert hopper_window.split_heads(128, 64, 132) == (1, 16)
    assert hopper_window.split_heads(32, 64, 132) == (4, 4)


def key_gradient(heads: int, tokens: int) -> hopper_window._KeyGradient:
    query = torch.empty(1, heads, tokens, 512, dtype=torch.bfloat16, device="meta")
    call = Call(query, query[:, :1], None, None, None, None, None, None, 128, None, 0.1)
    return hopper_window._KeyGradient(call, query, query, query[..., 0], query[..., 0])


def test_long_backwards_go_in_whole_rounds_of_programs_that_fit() -> None:
    keys = key_gradient(64, 16384)
    assert keys.chunk_runs == 264
    buffers = (*keys.stored, keys.sums[hopper_window.CARRIED :])
    assert sum(x.numel() * x.element_size() for x in buffers) <= hopper_window.CHUNK_BYTES


def test_backwards_of_many_heads_go_in_few_chunks() -> None:
    assert key_gradient(128, 512).chunk_runs == 16  # all of them
    assert key_gradient(256, 4096).chunk_runs == 66


def test_the_two_programs_of_a_run_s_sums_count_as_two() -> None:
    assert (key_gradient(64, 512).splits, key_gradient(64, 1024).splits) == (4, 2)
