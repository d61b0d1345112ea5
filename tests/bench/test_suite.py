"""Suite files: what they expand to, and that every mistake is one clear error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from csa_dispatch.bench.inputs import build_inputs
from csa_dispatch.bench.suite import load_suite, parse_suite, shipped_suites
from csa_dispatch.call import Kind

SMALL: dict[str, Any] = {
    "name": "small",
    "base": {"heads": 4, "head_dim": 32, "dtype": "float32"},
    "case": [
        {"name": "a", "tokens": 64, "must_ms": {"forward": 2}},
        {"name": "sweep", "tokens": [64, 128], "must_growth": 1.1, "must_like": "a"},
    ],
}


def test_a_list_of_tokens_is_one_case_for_each() -> None:
    suite = parse_suite(SMALL, "small.toml")
    assert [case.name for case in suite.cases] == ["a", "sweep T=64", "sweep T=128"]
    assert [case.series for case in suite.cases] == ["a", "sweep", "sweep"]
    assert [case.pool for case in suite.cases] == [16, 16, 32]
    assert {case.heads for case in suite.cases} == {4}
    assert suite.cases[0].limits.must_ms == {"forward": 2.0}
    assert suite.cases[2].limits.must_growth == 1.1


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ((), "colour", 1, "small.toml: colour: is not a known key"),
        ((), "device", "tpu", "small.toml: device: 'tpu' is not one of cpu, cuda"),
        ((), "case", [], "small.toml: case: a suite has at least one [[case]] table"),
        (("base",), "name", "x", "small.toml: base.name: every case has its own"),
        (("case", 0), "haeds", 4, "small.toml: case[0].haeds: is not a known key"),
        (("case", 0), "tokens", 0, "small.toml: case[0].tokens: is 0; it must be at least 1"),
        (("case", 0), "tokens", [], "small.toml: case[0].tokens: is an empty list"),
        (("case", 0), "kv_heads", 3, "small.toml: case[0].kv_heads: 3 does not divide heads 4"),
        (("case", 0), "kind", "dense", "small.toml: case[0].kind: 'dense' is not one of window"),
        (("case", 0), "dtype", "int8", "small.toml: case[0].dtype: 'int8' is not one of"),
        (("case", 0), "indices", "sorted", "small.toml: case[0].indices: 'sorted' is not one of"),
        (("case", 0), "directions", ["up"], "case[0].directions: 'up' is not one of forward"),
        (("case", 0), "must_ms", {"up": 1}, "small.toml: case[0].must_ms.up: 'up' is not one of"),
        (("case", 0), "goal_ms", {"both": 0}, "goal_ms.both: 0 is not a number above 0"),
        (("case", 0), "must_growth", 1.1, "must_growth: only a case with a list of tokens"),
        (("case", 0), "must_like", "b", "must_like: 'b' is not a case before this one"),
        (("case", 1), "name", "a", "case[1].name: 'a' is the name of two cases"),
        (("effort",), "rounds", 0, "small.toml: effort.rounds: is 0"),
        (("effort",), "minutes", 1, "small.toml: effort.minutes: is not a known key"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(
    place: tuple[Any, ...], key: str, value: object, message: str
) -> None:
    data = copy.deepcopy(SMALL)
    data["effort"] = {}
    table: Any = data
    for step in place:
        table = table[step]
    table[key] = value
    if key == "name" and place == ("case", 1):
        table["tokens"] = 64
        del table["must_growth"]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_suite(data, "small.toml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_file_names_the_shipped_suites() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml: no such file; shipped: cpu\.toml, h200"):
        load_suite("nowhere.toml")


def test_a_file_that_is_not_toml_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(ValueError, match=r"broken\.toml: not valid TOML: Invalid value"):
        load_suite(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"broken\.toml: cannot be read"):
        load_suite(path)


def test_every_shipped_suite_loads() -> None:
    for name in shipped_suites():
        assert load_suite(name).cases


def test_the_cpu_suite_builds() -> None:
    for case in load_suite("cpu.toml").cases[:2]:
        call = build_inputs(case, torch.device("cpu")).call
        assert call.query.shape == (1, 16, 2048, 128)
        assert call.sparse_kv is not None
        assert call.sparse_kv.shape[2] == 512


def test_dense_limits_of_the_h200_suite_are_multiples_of_its_arithmetic() -> None:
    case = next(case for case in load_suite("h200.toml").cases if case.kind is Kind.DENSE)
    visible = sum((t + 1) // case.compress_ratio for t in range(case.tokens))
    window = sum(min(t + 1, case.window) for t in range(case.tokens))
    flops = 4 * case.heads * case.head_dim * (visible + window)
    floor = flops / 500e12 * 1e3
    assert case.limits.must_ms["forward"] == pytest.approx(1.3 * floor, rel=2e-3)
    assert case.limits.goal_ms["forward"] == pytest.approx(1.1 * floor, rel=2e-3)
