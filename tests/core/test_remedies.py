"""A remedy, followed to the letter, makes the call valid."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import csa_dispatch
from csa_dispatch import CallSpec, attention
from csa_dispatch.functional import attention_with_past, attention_with_window_lse
from csa_dispatch.registry import backends
from csa_dispatch.wording import a_kind, as_text, told


def tensors(query: tuple[int, ...], local_kv: tuple[int, ...], **others: Any) -> dict[str, Any]:
    made = {"query": torch.ones(query), "local_kv": torch.ones(local_kv), **others}
    return {"sliding_window_size": 4, **made}


def indices(*shape: int, batch: int = 2) -> dict[str, Any]:
    kv = (batch, 1, 8, 16)
    made = tensors((batch, 4, 8, 16), kv, sparse_kv=torch.ones(kv))
    return {**made, "kv_indices": torch.zeros(shape, dtype=torch.int32)}


def sink(*shape: int) -> dict[str, Any]:
    return tensors((1, 4, 8, 16), (1, 1, 8, 16), attention_sink=torch.zeros(shape))


def scaled(scale: Any) -> dict[str, Any]:
    return tensors((1, 4, 8, 16), (1, 1, 8, 16), scale=scale)


FOLLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "batch of 1": (tensors((2, 4, 8, 16), (1, 1, 8, 16)), "local_kv.expand(2, -1, -1, -1)"),
    "other layout": (tensors((1, 4, 8, 16), (1, 8, 1, 16)), "local_kv.permute(0, 2, 1, 3)"),
    "SBHD": (tensors((1, 4, 8, 16), (8, 1, 1, 16)), "local_kv.permute(1, 2, 0, 3)"),
    "into SBHD": (
        tensors((8, 2, 4, 16), (2, 8, 1, 16), layout="SBHD"),
        "local_kv.permute(1, 0, 2, 3)",
    ),
    "no head": (tensors((1, 4, 8, 16), (1, 8, 16)), "local_kv.unsqueeze(1)"),
    "no head in a batch": (tensors((2, 4, 8, 16), (2, 8, 16)), "local_kv.unsqueeze(1)"),
    "no batch": (tensors((1, 4, 8, 16), (4, 8, 16)), "local_kv.unsqueeze(0)"),
    "neither": (tensors((1, 4, 8, 16), (8, 16)), "local_kv.unsqueeze(0).unsqueeze(1)"),
    "too many": (tensors((1, 4, 8, 16), (1, 1, 1, 8, 16)), "local_kv.squeeze(0)"),
    "THD's too many": (
        tensors((8, 4, 16), (1, 8, 1, 16), layout="THD"),
        "local_kv.squeeze(2).squeeze(0)",
    ),
    "BSHD's too few": (
        tensors((1, 8, 4, 16), (8, 16), layout="BSHD"),
        "local_kv.unsqueeze(0)",
    ),
    "indices of a batch of 1": (indices(1, 8, 3), "kv_indices.expand(2, -1, -1)"),
    "indices of no batch": (indices(8, 3), "kv_indices.expand(2, -1, -1)"),
    "indices of no batch for one": (indices(8, 3, batch=1), "kv_indices.expand(1, -1, -1)"),
    "indices without slots": (indices(2, 8), "kv_indices.unsqueeze(-1)"),
    "indices [B, K, T]": (indices(2, 3, 8), "kv_indices.transpose(1, 2)"),
    "indices [T, B, K]": (indices(8, 2, 3), "kv_indices.transpose(0, 1)"),
    "indices of heads": (indices(2, 4, 8, 3), "kv_indices.select(1, 0)"),
    "indices of heads last": (indices(2, 8, 4, 3), "kv_indices.select(2, 0)"),
    "sink of a batch": (sink(1, 4), "attention_sink.flatten()"),
    "sink of a number": (sink(), "attention_sink.expand(4)"),
    "scale of a tensor": (scaled(torch.tensor(0.5)), "scale.item()"),
    "scale of a bool": (scaled(True), "float(scale)"),
    "scale of a text": (scaled("0.5"), "float(scale)"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed_to_the_letter_a_remedy_makes_the_call_valid(name: str) -> None:
    made, expression = FOLLOWED[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        attention(**made)
    argument, remedy = re.fullmatch(
        r"(\w+) is .*?; it must be .*?\. (.*)", str(caught.value)
    ).groups()
    assert expression in remedy
    mended = eval(expression, {"float": float, **made})
    attention(**{**made, argument: mended})


SAID = {
    "head_dim": (tensors((1, 4, 8, 16), (1, 1, 8, 9)), "Make its head_dim 16 instead of 9"),
    "few rows": (tensors((1, 4, 8, 16), (1, 1, 6, 16)), "Make its tokens 8 instead of 6"),
    "whole layout": (tensors((1, 8, 4, 16), (1, 8, 1, 16)), "Pass layout='BSHD': query and KV"),
    "past": (tensors((1, 4, 8, 16), (1, 1, 12, 16)), "attention_with_past"),
    "5-d query": (tensors((1, 1, 4, 8, 16), (1, 1, 8, 16)), "until 4 are left"),
    "3-d query": (tensors((4, 8, 16), (1, 1, 8, 16)), "layout='THD' .*query.unsqueeze.0"),
    "1-d query": (tensors((16,), (1, 1, 8, 16)), "Add what it lacks"),
    "4-d THD": (tensors((1, 4, 8, 16), (8, 16), layout="THD"), "layout='BHSD' or"),
    "sink of ranks": (sink(16), "this rank's slice"),
    "sink of no size": (sink(3, 3), "Pass one dimension"),
    "mask": ({**indices(2, 8, 3), "kv_indices": torch.ones(2, 8, 3).bool()}, "Pass entries' nu"),
    "complex scale": (scaled(1j), "Pass one number"),
    "scale of two": (scaled(torch.ones(2)), "Pass one number"),
}


@pytest.mark.parametrize("name", SAID)
def test_a_remedy_fits_what_is_wrong(name: str) -> None:
    made, remedy = SAID[name]
    with pytest.raises((TypeError, ValueError), match=remedy) as caught:
        attention(**made)
    if name not in ("past", "sink of ranks"):
        assert not re.search("attention_with_past|TP|Cast it", str(caught.value))


def test_past_rows_are_told_of_as_they_are_passed() -> None:
    query = torch.ones(2, 4, 3, 16)
    for shape, remedy in (
        ((2, 1, 6, 9), "Make its head_dim 16 instead of 9"),
        ((1, 1, 6, 16), r"local_kv.expand\(2, -1, -1, -1\)"),
        ((2, 6, 1, 16), "Pass rows of earlier tokens and the queries' own"),
    ):
        with pytest.raises(ValueError, match=remedy) as caught:
            attention_with_past(query, torch.ones(shape), past=3, sliding_window_size=4)
        assert f"of shape {list(shape)}; it must be [2, G, P + 3, 16]" in str(caught.value)
        assert "attention_with_past" not in str(caught.value)


def test_a_window_of_any_tensor_is_refused_by_name() -> None:
    made = indices(1, 8, 2, batch=1)
    for window in (torch.ones(0), torch.ones(2)):
        with pytest.raises(TypeError, match="sliding_window_size is tensor"):
            attention_with_window_lse(**{**made, "sliding_window_size": window})


def test_messages_are_bounded_whatever_the_value() -> None:
    for scale in (list(range(200000)), "x" * 200000, [10**5000], 10**5000):
        with pytest.raises((TypeError, ValueError), match="scale is") as caught:
            attention(**scaled(scale))
        assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="layout is"):
        attention(**scaled(None), layout=10**5000)  # pyright: ignore[reportArgumentType]
    assert as_text(7) == "7"
    assert told([1]) == "[1] (list)"
    assert [a_kind(value) for value in (1, [], None)] == ["an int", "a list", "None"]


def test_unknown_backends_get_advice_that_fits() -> None:
    with pytest.raises(
        ValueError, match=r"Name eager alone, and pass backward='triton' beside it"
    ):
        csa_dispatch.use_backend("eager+triton")
    with pytest.raises(ValueError, match="pass backward_backend='triton' beside"):
        attention(**scaled(None), backend="eager+triton")
    for name in ("", "zzz"):
        with pytest.raises(ValueError, match="csa-dispatch backends lists them"):
            csa_dispatch.use_backend(name)
    with pytest.raises(
        ValueError, match=r"documents is 'x'; it must be one of none, cu_seqlens. "
    ):
        csa_dispatch.explain(csa_dispatch.IndexerSpec(documents="x"), device="cpu")


FAR = {"dtype": ("float64",), "heads": (1, 7, 300), "head_dim": (8, 600), "capability": (75,)}


@pytest.mark.parametrize("name", ["attention_gym", "cudnn", "fa4", "flex"])
@pytest.mark.parametrize("field", FAR)
def test_a_backend_named_as_remedy_takes_the_value(name: str, field: str) -> None:
    backend, triton = backends()[name].backend, backends()["triton"].backend
    assert backend is not None
    assert triton is not None
    for claims in (backend.forward_capabilities, backend.backward_capabilities):
        assert claims is not None
        for value in FAR[field]:
            spec = CallSpec(device_type="cuda", capability=90)._replace(**{field: value})
            for reason in claims.reasons(spec):
                if reason.field != field or "triton" not in reason.remedy.lower():
                    continue
                assert "split" not in reason.remedy
                refused = {one.field for one in triton.forward_capabilities.reasons(spec)}
                assert field not in refused or "eager" in reason.remedy
                # With eager beside it, triton's own bound is told.
                if field in refused:
                    assert re.search("triton (up|for|below)|eager below", reason.remedy)
