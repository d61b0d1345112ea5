"""G13, G14, G24: bad arguments are one clear error, the same whatever backend is forced."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from csa_dispatch import BackendRefused, attention, record_receipts

OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


def rows(heads: int, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(batch, heads, tokens, 16, dtype=dtype)


def slots(dtype: torch.dtype, batch: int = 1) -> Tensor:
    return torch.zeros(batch, 8, 3, dtype=dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """A good call of 8 heads, 8 tokens, 6 pool rows; with changes, a bad one."""
    good = {
        "query": rows(8, 8),
        "local_kv": rows(1, 8),
        "sparse_kv": rows(1, 6),
        "kv_indices": slots(torch.int32),
        "attention_sink": torch.zeros(8),
        "sliding_window_size": 4,
    }
    return {**good, **changes}


TWO_ENTRIES = {
    "query": rows(8, 8, batch=2),
    "local_kv": rows(1, 8, batch=2),
    "sparse_kv": rows(1, 6, batch=2),
    "kv_indices": slots(torch.int32, 2),
}
BOTH = {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS[:2].repeat(2)[:3]}

# What is wrong: the changed arguments, the error, and what its message must name.
BAD: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "sink longer": (
        {"attention_sink": torch.zeros(16)},
        ValueError,
        ("attention_sink", "8", "16"),
    ),
    "sink of one": ({"attention_sink": torch.zeros(1)}, ValueError, ("attention_sink", "8", "1")),
    "sink float64": (
        {"attention_sink": torch.zeros(8).double()},
        ValueError,
        ("attention_sink", "float64", "float32"),
    ),
    "scale 0": ({"scale": 0.0}, ValueError, ("scale", "0.0", "positive")),
    "scale -1": ({"scale": -1.0}, ValueError, ("scale", "-1", "positive")),
    "scale nan": ({"scale": math.nan}, ValueError, ("scale", "nan", "finite")),
    "scale inf": ({"scale": math.inf}, ValueError, ("scale", "inf", "finite")),
    "only cu_seqlens": ({"cu_seqlens": OFFSETS}, ValueError, ("cu_seqlens_k",)),
    "only cu_seqlens_k": ({"cu_seqlens_k": OFFSETS}, ValueError, ("cu_seqlens",)),
    "cu_seqlens int64": (
        {**BOTH, "cu_seqlens": OFFSETS.long()},
        TypeError,
        ("cu_seqlens", "int64", "int32"),
    ),
    "cu_seqlens with a batch": ({**TWO_ENTRIES, **BOTH}, ValueError, ("cu_seqlens", "2", "1")),
    "unequal offsets": (
        {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS[:2]},
        ValueError,
        ("cu_seqlens_k", "2", "3"),
    ),
    "float slots": (
        {"kv_indices": slots(torch.float32)},
        TypeError,
        ("kv_indices", "float32", "int32"),
    ),
    "bool slots": ({"kv_indices": slots(torch.bool)}, TypeError, ("kv_indices", "bool", "int32")),
    "int16 slots": (
        {"kv_indices": slots(torch.int16)},
        TypeError,
        ("kv_indices", "int16", "int32"),
    ),
    "window -1": ({"sliding_window_size": -1}, ValueError, ("sliding_window_size", "-1")),
    "window True": ({"sliding_window_size": True}, TypeError, ("sliding_window_size", "True")),
    "window 1.5": ({"sliding_window_size": 1.5}, TypeError, ("sliding_window_size", "1.5")),
    "heads of KV differ": (
        {"local_kv": rows(8, 8), "sparse_kv": rows(1, 6)},
        ValueError,
        ("sparse_kv", "1", "8"),
    ),
    "mixed dtypes": (
        {"sparse_kv": rows(1, 6, dtype=torch.bfloat16)},
        ValueError,
        ("sparse_kv", "bfloat16", "float32"),
    ),
    "mixed devices": (
        {"local_kv": rows(1, 8).to("meta")},
        ValueError,
        ("local_kv", "meta", "cpu"),
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_argument_is_named_with_what_it_is_and_must_be(backend: str, fault: str):
    changes, error, names = BAD[fault]
    with record_receipts() as receipts, pytest.raises(error) as raised:
        attention(**arguments(**changes), backend=backend)
    for name in names:
        assert name in str(raised.value)
    assert not receipts, "a backend ran before its arguments were checked"


def test_the_same_error_whatever_backend_is_forced(backend: str):
    for changes, error, _ in BAD.values():
        messages = set()
        for forced in (backend, None):
            with pytest.raises(error) as raised:
                attention(**arguments(**changes), backend=forced)
            messages.add(str(raised.value))
        assert len(messages) == 1


def test_the_unchanged_call_is_good(backend: str):
    assert attention(**arguments(), backend=backend).isfinite().all()


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_offsets_past_the_pool_read_nothing_past_it(backend: str, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(24)
    query = torch.randn(1, 2, 8, 16, generator=generator)
    local_kv = torch.randn(1, kv_heads, 8, 16, generator=generator)
    sparse_kv = torch.randn(1, kv_heads, 6, 16, generator=generator)
    kv_indices = torch.tensor([0, 2, 3, 5, 6, 40], dtype=torch.int32).expand(1, 8, 6)

    def result(last: int) -> Tensor:
        output = attention(
            query,
            local_kv,
            sparse_kv,
            kv_indices,
            sliding_window_size=2,
            cu_seqlens=OFFSETS,
            cu_seqlens_k=torch.tensor([0, 3, last], dtype=torch.int32),
            backend=backend,
        )
        assert isinstance(output, Tensor)
        return output

    try:
        within = result(6)
    except BackendRefused:
        pytest.skip(f"{backend} does not claim {kv_heads} KV heads for 2 heads")
    assert torch.equal(result(50), within)
