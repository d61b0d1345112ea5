"""Every bad argument is one clear error, in every layout, before anything runs."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import csa_dispatch
from csa_dispatch import attention, record_receipts, validation
from tests.core.probes import inputs


def to_layout(layout: str, **tensors: Any) -> dict[str, Any]:
    """BHSD tensors in another layout's order."""

    def query(x: torch.Tensor) -> torch.Tensor:
        return {
            "BHSD": x,
            "BSHD": x.permute(0, 2, 1, 3),
            "SBHD": x.permute(2, 0, 1, 3),
            "THD": x[0].permute(1, 0, 2),
        }[layout]

    moved = dict(tensors)
    for name in ("query", "local_kv", "sparse_kv"):
        if name in moved:
            moved[name] = query(moved[name])
    if layout == "THD":
        for name in ("kv_indices", "doc_ids"):
            if name in moved:
                moved[name] = moved[name][0]
    return moved


def arguments(**changes: Any) -> dict[str, Any]:
    made = inputs()._asdict()
    made["sliding_window_size"] = 4
    made.update(changes)
    return made


def check_form(message: str) -> None:
    """A message has an argument of the function, what it is, what it must be and a remedy."""
    found = re.fullmatch(r"(\w+) is (\S.*); it must be (\S.*?)\. (\S.*[.?])", message)
    assert found, f"no argument, actual, required and remedy: {message}"
    argument, _, _, remedy = found.groups()
    assert argument in inspect.signature(attention).parameters
    assert len(remedy.split()) > 1, f"no remedy: {message}"


OFFSETS = torch.tensor([0, 4, 8], dtype=torch.int32)
HUGE = torch.empty(1, 1, 1, 1, device="meta").expand(1, 1, 2**31, 1)
NOTHING = dict.fromkeys(("sparse_kv", "kv_indices", "attention_sink"))

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "window bool": ({"sliding_window_size": True}, TypeError, "sliding_window_size is True"),
    "window float": ({"sliding_window_size": 1.5}, TypeError, "sliding_window_size is 1.5"),
    "window negative": ({"sliding_window_size": -1}, ValueError, "sliding_window_size is -1"),
    "scale zero": ({"scale": 0.0}, ValueError, "scale is 0.0"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale is nan"),
    "scale inf": ({"scale": float("inf")}, ValueError, "scale is inf"),
    "scale huge": (
        {"scale": 1e39},
        ValueError,
        r"scale is 1e\+39; it must be positive",
    ),
    "scale huge int": ({"scale": 10**400}, ValueError, "scale is 1000"),
    "window huge": ({"sliding_window_size": 2**63}, ValueError, "sliding_window_size is 92233"),
    "ratio huge": (
        {"kv_indices": None, "compress_ratio": 2**31},
        ValueError,
        "compress_ratio is 2147483648; it must be at most 2147483647",
    ),
    "scale negative": ({"scale": -1}, ValueError, "scale is -1"),
    "scale tensor": ({"scale": torch.tensor(0.5)}, TypeError, "scale is tensor"),
    "query none": ({"query": None}, TypeError, "query is NoneType"),
    "local list": ({"local_kv": [1]}, TypeError, "local_kv is list"),
    "sparse dtype": ({"sparse_kv": torch.randn(1, 1, 6, 16).double()}, ValueError, "sparse_kv"),
    "indices float": ({"kv_indices": torch.zeros(1, 8, 3)}, TypeError, "kv_indices"),
    "indices bool": (
        {"kv_indices": torch.zeros(1, 8, 3, dtype=torch.bool)},
        TypeError,
        "kv_indices is torch.bool; it must be int32 or int64",
    ),
    "indices int16": (
        {"kv_indices": torch.zeros(1, 8, 3, dtype=torch.int16)},
        TypeError,
        "kv_indices",
    ),
    "indices rows": (
        {"kv_indices": torch.zeros(1, 9, 3, dtype=torch.int32)},
        ValueError,
        "kv_indices",
    ),
    "sink length": (
        {"attention_sink": torch.zeros(16)},
        ValueError,
        r"attention_sink is of shape \[16\]; it must be \[4\].*TP",
    ),
    "sink one": ({"attention_sink": torch.zeros(1)}, ValueError, r"\[1\]; it must be \[4\]"),
    "sink batch": (
        {"attention_sink": torch.zeros(1, 4)},
        ValueError,
        r"\[1, 4\]; .*Pass attention_sink.flatten\(\)",
    ),
    "sink of no dimension": (
        {"attention_sink": torch.tensor(1.0)},
        ValueError,
        r"attention_sink.expand\(4\)",
    ),
    "sink double": (
        {"attention_sink": torch.zeros(4, dtype=torch.float64)},
        ValueError,
        "attention_sink is torch.float64",
    ),
    "no selection": ({"kv_indices": None}, ValueError, "compress_ratio selects"),
    "both selections": ({"compress_ratio": 4}, ValueError, "compress_ratio is 4 with kv_indices"),
    "ratio bool": (
        {"kv_indices": None, "compress_ratio": True},
        TypeError,
        "compress_ratio is True",
    ),
    "ratio zero": ({"kv_indices": None, "compress_ratio": 0}, ValueError, "compress_ratio is 0"),
    "indices alone": ({"sparse_kv": None}, ValueError, "kv_indices is given"),
    "one offset": ({"cu_seqlens": OFFSETS}, ValueError, "cu_seqlens_k is None"),
    "other offset": ({"cu_seqlens_k": OFFSETS}, ValueError, "cu_seqlens is None"),
    "offsets int64": (
        {"cu_seqlens": OFFSETS.long(), "cu_seqlens_k": OFFSETS.long()},
        TypeError,
        "cu_seqlens is torch.int64; it must be int32",
    ),
    "offsets unequal": (
        {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS[:2]},
        ValueError,
        r"cu_seqlens_k is of shape \[2\]",
    ),
    "offsets scalar": (
        {"cu_seqlens": OFFSETS[0], "cu_seqlens_k": OFFSETS[0]},
        ValueError,
        r"cu_seqlens is of shape \[\]",
    ),
    "one offset element": (
        {"cu_seqlens": OFFSETS[:1], "cu_seqlens_k": OFFSETS[:1]},
        ValueError,
        r"cu_seqlens is of shape \[1\]",
    ),
    "ids and pool offsets": (
        {"cu_seqlens_k": OFFSETS, "doc_ids": torch.zeros(1, 8, dtype=torch.int32)},
        ValueError,
        "doc_ids is given with cu_seqlens_k; it must be None",
    ),
    "ids and offsets": (
        {
            "cu_seqlens": OFFSETS,
            "cu_seqlens_k": OFFSETS,
            "doc_ids": torch.zeros(1, 8, dtype=torch.int32),
        },
        ValueError,
        "doc_ids is given with cu_seqlens",
    ),
    "ids float": ({"doc_ids": torch.zeros(1, 8)}, TypeError, "doc_ids is torch.float32"),
    "ids rows": (
        {"doc_ids": torch.zeros(1, 7, dtype=torch.int32)},
        ValueError,
        "doc_ids is of shape",
    ),
    "ids device": (
        {"doc_ids": torch.zeros(1, 8, dtype=torch.int32, device="meta")},
        ValueError,
        "doc_ids is on meta; .*Make it on query's device",
    ),
    "device": ({"sparse_kv": torch.empty(1, 1, 6, 16, device="meta")}, ValueError, "on meta"),
    "lazy parameter": (
        {"attention_sink": torch.nn.UninitializedParameter()},
        ValueError,
        "attention_sink is an uninitialised parameter",
    ),
    "sparse tensor": ({"local_kv": torch.eye(4).to_sparse()}, ValueError, "local_kv is of layout"),
    "backend": ({"backend": "eagre"}, ValueError, "Did you mean 'eager'"),
    "backend unknown": ({"backend": "nothing like it"}, ValueError, "backend is 'nothing"),
    "backend type": ({"backend": 3}, TypeError, "backend is 3"),
    "backward type": ({"backward_backend": 3}, TypeError, "backward_backend is 3"),
    "ratio float": ({"kv_indices": None, "compress_ratio": 4.0}, TypeError, "compress_ratio is 4"),
    "ratio alone": (
        {"kv_indices": None, "sparse_kv": None, "compress_ratio": 4},
        ValueError,
        "compress_ratio is given without sparse_kv; it must be None then",
    ),
    "check_values": ({"check_values": 1}, TypeError, "check_values is 1"),
    "return_lse": ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'"),
}

BAD_BHSD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "layout": ({"layout": "bhsd"}, ValueError, "layout is 'bhsd'"),
    "query dims": ({"query": torch.ones(4, 8, 16)}, ValueError, "query is of shape"),
    "query ints": ({"query": torch.ones(1, 4, 8, 16).int()}, TypeError, "query is torch.int32"),
    "query complex": (
        {"query": torch.ones(1, 4, 8, 16, dtype=torch.complex64)},
        TypeError,
        "query is torch.complex64",
    ),
    "query empty": ({"query": torch.ones(1, 4, 0, 16)}, ValueError, "query is of shape"),
    "query tokens": (
        {**NOTHING, "query": HUGE, "local_kv": HUGE},
        ValueError,
        "query is of 2147483648 tokens",
    ),
    "local dims": ({"local_kv": torch.ones(1, 8, 16)}, ValueError, r"local_kv.unsqueeze\(1\)"),
    "local dtype": ({"local_kv": torch.ones(1, 1, 8, 16).half()}, ValueError, "local_kv is torch"),
    "local dtype of equal size": (
        {
            **NOTHING,
            "query": torch.ones(1, 4, 8, 16, dtype=torch.bfloat16),
            "local_kv": torch.ones(1, 1, 8, 16, dtype=torch.float16),
        },
        ValueError,
        "local_kv is torch.float16",
    ),
    "ids in a column": (
        {"doc_ids": torch.zeros(8, 1, dtype=torch.int32)},
        ValueError,
        r"doc_ids is of shape \[8, 1\]",
    ),
    "local rows": (
        {"local_kv": torch.ones(1, 1, 9, 16)},
        ValueError,
        "local_kv is of shape.*attention_with_past",
    ),
    "local heads": (
        {"local_kv": torch.ones(1, 3, 8, 16), "sparse_kv": torch.ones(1, 3, 6, 16)},
        ValueError,
        "divides query's 4 heads",
    ),
    "no local heads": ({"local_kv": torch.ones(1, 0, 8, 16)}, ValueError, "local_kv is of 0 KV"),
    "sparse channels": (
        {"sparse_kv": torch.ones(1, 1, 6, 8)},
        ValueError,
        "sparse_kv is of shape",
    ),
    "sparse heads": (
        {"local_kv": torch.ones(1, 4, 8, 16)},
        ValueError,
        "sparse_kv is of 1 KV heads; it must be of 4",
    ),
    "sparse rows": (
        {
            **NOTHING,
            "query": HUGE[:, :, :1],
            "local_kv": HUGE[:, :, :1],
            "sparse_kv": HUGE,
            "compress_ratio": 4,
        },
        ValueError,
        "sparse_kv is of 2147483648 rows",
    ),
    "packed batch": (
        {**inputs(batch=2)._asdict(), "cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS},
        ValueError,
        "batch size 2.*doc_ids",
    ),
}


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "SBHD", "THD"])
@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_named_in_every_layout(name: str, layout: str) -> None:
    changes, error, message = BAD[name]
    made = arguments(**changes)
    tensors = {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}
    if "local_kv" in changes or "query" in changes:
        tensors.pop("local_kv", None)
    keep_shape = [key for key in tensors if key in changes and tensors[key].ndim < 3]
    moved = to_layout(layout, **{k: v for k, v in tensors.items() if k not in keep_shape})
    if layout == "THD" and "doc_ids" in keep_shape:
        moved["doc_ids"] = tensors["doc_ids"][0]
    with record_receipts() as receipts, pytest.raises(error, match=message) as caught:
        attention(**{**made, **moved}, layout=layout)
    assert receipts == []
    check_form(str(caught.value))


@pytest.mark.parametrize("name", BAD_BHSD)
def test_bad_argument_is_named_with_a_remedy(name: str) -> None:
    changes, error, message = BAD_BHSD[name]
    with record_receipts() as receipts, pytest.raises(error, match=message) as caught:
        attention(**arguments(**changes))
    assert receipts == []
    check_form(str(caught.value))


def failed_at(error: BaseException) -> int | None:
    """The line of validation.py whose ``fail()`` raised ``error``."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == validation.__file__]
    return lines[-2] if len(lines) > 1 else None  # the last is fail()'s own


def test_every_check_has_a_case_in_the_tables() -> None:
    tree = ast.parse(inspect.getsource(validation))
    lines = {
        call.lineno: ast.unparse(call)
        for function in tree.body
        # That DTensors and plain tensors do not mix is tested where there are process groups.
        if isinstance(function, ast.FunctionDef) and function.name != "_mixed"
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "fail"
    }
    assert len(lines) > 30
    for changes, *_ in (*BAD.values(), *BAD_BHSD.values()):
        with pytest.raises((TypeError, ValueError)) as caught:
            attention(**arguments(**changes))
        lines.pop(failed_at(caught.value), None)
    assert not lines


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1, 6, 16)])
    with pytest.raises(ValueError, match="sparse_kv is nested; it must be a dense"):
        attention(**arguments(sparse_kv=nested))


def test_devices_of_one_type_are_told_apart() -> None:
    with FakeTensorMode():  # devices without the hardware
        made = arguments()
        on_first = {
            name: torch.empty(value.shape, dtype=value.dtype, device="cuda:0")
            for name, value in made.items()
            if isinstance(value, torch.Tensor)
        }
        pool = torch.empty(made["sparse_kv"].shape, device="cuda:1")
        with pytest.raises(ValueError, match="sparse_kv is on cuda:1"):
            attention(**{**made, **on_first, "sparse_kv": pool})


def test_unknown_layout_is_named() -> None:
    for layout in ("bhsd", "", None, ["BHSD"]):
        with pytest.raises(ValueError, match="layout is"):
            attention(**arguments(), layout=layout)


def test_bad_argument_cannot_ride_on_a_good_ones_cache_entry() -> None:
    made = arguments(sliding_window_size=1, scale=1.0)
    attention(**made, backend="eager")
    for name, bad in (
        ("sliding_window_size", True),
        ("sliding_window_size", 1.0),
        ("scale", True),
    ):
        with pytest.raises(TypeError, match=name):
            attention(**{**made, name: bad}, backend="eager")
    for bad in (torch.zeros(4).to_mkldnn(), torch.zeros(4).to_sparse()):
        attention(**{**made, "attention_sink": torch.zeros(4)}, backend="eager")
        with pytest.raises((TypeError, ValueError), match="attention_sink is"):
            attention(**{**made, "attention_sink": bad}, backend="eager")


def test_validation_holds_under_tracing() -> None:
    made = arguments(attention_sink=torch.zeros(16))
    compiled = torch.compile(attention, backend="eager", fullgraph=False)
    with pytest.raises(Exception, match="attention_sink is of shape"):
        compiled(**made)


@pytest.mark.parametrize("value", ["yes", 1, torch.tensor(True)])
@pytest.mark.parametrize("name", ["check_values", "return_lse"])
def test_flags_must_be_bools(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} is .*; it must be a bool or None"):
        attention(**arguments(), **{name: value})


def test_a_plans_flag_must_be_a_bool() -> None:
    plan = csa_dispatch.resolve(**arguments())
    with pytest.raises(TypeError, match="return_lse is 1"):
        plan(**arguments(), return_lse=1)  # pyright: ignore[reportArgumentType]


def test_offsets_may_be_strided_and_ratios_as_large_as_any(recwarn: Any) -> None:
    made = arguments(cu_seqlens=OFFSETS.repeat_interleave(2)[::2], cu_seqlens_k=OFFSETS // 2)
    whole = arguments(cu_seqlens=OFFSETS, cu_seqlens_k=OFFSETS // 2)
    assert torch.equal(attention(**made), attention(**whole))
    assert not recwarn.list
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    made = arguments(kv_indices=None, doc_ids=ids, attention_sink=None, sliding_window_size=0)
    output = attention(**made, compress_ratio=2**31 - 1)
    assert torch.equal(output, torch.zeros_like(output))


def test_public_names_are_all_importable() -> None:
    for name in csa_dispatch.__all__:
        assert getattr(csa_dispatch, name) is not None
