"""Suite files: what they expand to, and that every mistake is one clear error."""

from __future__ import annotations

import copy
import math
import sys
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
        ((), "name", "", "small.toml: name: is ''; it must be one line of printable"),
        ((), "name", "a\x1b[31m", "small.toml: name: is 'a\\x1b[31m'; it must be one line of"),
        (("case", 0), "name", " ", "small.toml: case[0].name: is ' '; it must be one line of"),
        (("case", 0), "name", "a\nb", "small.toml: case[0].name: is 'a\\nb'; it must be one line"),
        (("case", 0), "tokens", 0, "case[0].tokens: is 0; it must be a whole number from 1"),
        (("case", 0), "tokens", [], "small.toml: case[0].tokens: is an empty list"),
        (("case", 0), "kv_heads", 3, "small.toml: case[0].kv_heads: 3 does not divide heads 4"),
        (("case", 0), "kind", "dense", "small.toml: case[0].kind: 'dense' is not one of window"),
        (("case", 0), "dtype", "int8", "small.toml: case[0].dtype: 'int8' is not one of"),
        (("case", 0), "indices", "sorted", "small.toml: case[0].indices: 'sorted' is not one of"),
        (("case", 0), "directions", ["up"], "case[0].directions: 'up' is not one of forward"),
        (("case", 0), "must_ms", {"up": 1}, "small.toml: case[0].must_ms.up: 'up' is not one of"),
        (("case", 0), "goal_ms", {"both": 0}, "goal_ms.both: 0 is not a finite number above 0"),
        (("case", 0), "must_ms", {"both": math.inf}, "must_ms.both: inf is not a finite number"),
        (("case", 0), "goal_ms", {"both": math.nan}, "goal_ms.both: nan is not a finite number"),
        (("case", 0), "must_extra_mib", {"both": 10**400}, "both: 10000000000000000000000000000"),
        (("case", 1), "must_growth", math.nan, "case[1].must_growth: nan is not a finite number"),
        (("effort",), "seconds", math.inf, "effort.seconds: inf is not a finite number above 0"),
        (("case", 0), "directions", ["both"], "must_ms.forward: the case times both alone"),
        (("case", 0), "goal_ms", {"both": 1}, "goal_ms.both: the case times forward, backward"),
        (("base",), "goal_ms", {"both": 1}, "base.goal_ms.both: no case that takes it from base"),
        (("case", 1), "directions", ["both"], "must_like: 'a' times forward, backward and this"),
        (("case", 1), "directions", ["both", "both"], "directions: 'both' is listed twice"),
        (("case", 0), "must_growth", 1.1, "must_growth: only a case with a list of tokens"),
        (("case", 0), "must_like", "b", "must_like: 'b' is not a case before this one"),
        (("case", 1), "name", "a", "case[1].name: 'a' is the name of two cases"),
        (("effort",), "rounds", 0, "small.toml: effort.rounds: is 0"),
        (("effort",), "rounds", 10**20, "effort.rounds: is 100000000000000000000; it must be"),
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


@pytest.mark.parametrize(
    ("key", "value", "least", "most"),
    [
        ("batch", 2**31, 1, 2**31 - 1),
        ("tokens", 2**31, 1, 2**31 - 1),
        ("tokens", [64, 10**20], 1, 2**31 - 1),
        ("pool", 2**31, 0, 2**31 - 1),
        ("slots", 2**31, 0, 2**31 - 1),
        ("compress_ratio", 10**24, 1, 2**31 - 1),
        ("window", 2**70, 0, sys.maxsize),
        ("seed", 10**20, 0, 2**63 - 1),
    ],
)
def test_sizes_are_held_to_those_of_calls(
    key: str, value: int | list[int], least: int, most: int
) -> None:
    data = copy.deepcopy(SMALL)
    data["case"][1][key] = value
    if key == "tokens":
        data["case"][1].pop("must_growth")
    actual = value[-1] if isinstance(value, list) else value
    required = f"is {actual}; it must be a whole number from {least} to {most}"
    with pytest.raises(ValueError, match=rf"^small\.toml: case\[1\]\.{key}: {required}$"):
        parse_suite(data, "small.toml")


def test_a_long_value_or_key_is_shown_in_part() -> None:
    long = ({"device": "x" * 10**6}, {"base": {"batch": 16**5000}}, {"x" * 10**6: 1})
    for change in (*long, {"a\nb": 1}):
        with pytest.raises(ValueError, match=r"^small\.toml: ") as caught:
            parse_suite(SMALL | change, "small.toml")
        assert len(str(caught.value)) < 300
        assert "\n" not in str(caught.value)


def test_the_largest_values_of_calls_are_taken() -> None:
    data = copy.deepcopy(SMALL)
    data["case"][0] |= {"window": sys.maxsize, "seed": 2**63 - 1, "compress_ratio": 2**31 - 1}
    case = parse_suite(data, "small.toml").cases[0]
    assert (case.window, case.seed, case.pool) == (sys.maxsize, 2**63 - 1, 0)
    assert build_inputs(case, torch.device("cpu")).call.sliding_window_size == sys.maxsize


def test_limits_of_the_base_hold_where_a_case_times_their_direction() -> None:
    data = copy.deepcopy(SMALL)
    data["base"]["must_ms"] = {"forward": 1, "both": 2}
    data["case"].append({"name": "b", "tokens": 64, "directions": ["both"]})
    assert parse_suite(data, "small.toml").cases[-1].limits.must_ms["both"] == 2


def test_a_sweep_and_a_case_cannot_share_a_name() -> None:
    data = copy.deepcopy(SMALL)
    data["case"].append({"name": "sweep", "tokens": 256})
    with pytest.raises(ValueError, match=r"case\[2\]\.name: 'sweep' is the name of two cases"):
        parse_suite(data, "small.toml")


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 9999, "cannot be read: arrays or tables are nested more than 100 deep"),
        ("a = " + "{a=" * 9999, "cannot be read: arrays or tables are nested more than 100 deep"),
        ("name" + ".a" * 9999 + " = 1", "cannot be read: arrays or tables are nested more than"),
        ("a = " + "9" * 5000, "not valid TOML: Exceeds the limit (4300 digits)"),
        (f'a = 1\n["{"k" * 9999}"]\n' * 2, "not valid TOML: Cannot "),
    ],
    ids=["arrays", "tables", "dotted", "digits", "key"],
)
def test_what_python_cannot_parse_or_show_is_one_short_error(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        load_suite(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_file_may_nest_as_deep_as_is_said(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("summary = " + "[" * 99 + "]" * 99)
    with pytest.raises(ValueError, match=r"deep\.toml: case: a suite has at least one"):
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
