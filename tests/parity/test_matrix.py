"""Matrices: what a file may say, and that a wrong one is refused by file and key."""

from __future__ import annotations

import copy
import itertools

import pytest

from csa_dispatch import Kind
from csa_dispatch.parity import MatrixError, load_matrix
from csa_dispatch.parity.expand import CaseWork, FieldWork, Selection, expand
from csa_dispatch.parity.matrix import parse_matrix, shipped_matrices
from csa_dispatch.testing.field_cases import field_cases

GROUP = {"name": "g", "source": "axes"}
LIST = {"name": "g", "source": "list", "cases": [{}]}


def matrix(*groups: dict, **top: object) -> dict:
    return {"name": "m", "group": list(groups), **top}


@pytest.mark.parametrize(
    ("data", "key", "text"),
    [
        ({"group": [GROUP]}, "name", "missing"),
        ({"name": "m"}, "group", "at least one"),
        (matrix(GROUP, colour=1), "colour", "not a known key"),
        (matrix(GROUP, device="tpu"), "device", "cpu, cuda"),
        (matrix(GROUP, backends="eager"), "backends", "list of strings"),
        (matrix({"name": "g"}), "group[0].source", "missing"),
        (matrix({**GROUP, "source": "dream"}), "group[0].source", "boundaries"),
        (matrix(GROUP, GROUP), "group[1].name", "two groups"),
        (matrix({**GROUP, "axis": {}}), "group[0].axis", "not a known key"),
        (matrix({**GROUP, "axes": {"head": [1]}}), "group[0].axes.head", "not a field"),
        (matrix({**GROUP, "axes": {"heads": 1}}), "group[0].axes.heads", "list of values"),
        (matrix({**GROUP, "axes": {"heads": ["1"]}}), "group[0].axes.heads", "not a int"),
        (matrix({**GROUP, "axes": {"heads": [True]}}), "group[0].axes.heads", "not a int"),
        (matrix({**GROUP, "axes": {"dtype": ["int8"]}}), "group[0].axes.dtype", "bfloat16"),
        (matrix({**GROUP, "axes": {"kind": ["ring"]}}), "group[0].axes.kind", "gather"),
        (
            matrix({**GROUP, "axes": {"memory": ["x"]}}),
            "group[0].axes.memory",
            "it must be one of",
        ),
        (matrix({**GROUP, "axes": {"needs_grad": ["x"]}}), "group[0].axes.needs_grad", "qlps"),
        (matrix({**GROUP, "layouts": ["DSHB"]}), "group[0].layouts", "SBHD"),
        (matrix({**GROUP, "strength": 3}), "group[0].strength", "each pair"),
        (matrix({**GROUP, "reference": "guess"}), "group[0].reference", "oracle, chunked"),
        (matrix({**GROUP, "crossed": 1}), "group[0].crossed", "true or false"),
        (matrix({**GROUP, "cases": [{}]}), "group[0].cases", "list"),
        (matrix({**GROUP, "dtypes": ["float32"]}), "group[0].dtypes", "field"),
        (matrix({**LIST, "axes": {}}), "group[0].axes", "axes"),
        (matrix({**LIST, "cases": []}), "group[0].cases", "list of tables"),
        (matrix({**LIST, "cases": [{"heads": 3, "kv_heads": 2}]}), "group[0].cases[0]", "divisor"),
        (matrix({**LIST, "base": {"hats": 3}}), "group[0].base.hats", "not a field"),
        (matrix(GROUP, limits={"eager": {}}), "limits.eager.max_blocks", "missing"),
        (matrix(GROUP, limits={"eager": 3}), "limits.eager", "not a table"),
        (
            matrix(GROUP, limits={"eager": {"max_blocks": 1, "environment": "X"}}),
            "limits.eager.environment",
            "NAME=value",
        ),
    ],
)
def test_a_malformed_matrix_is_one_error_with_file_and_key(data: dict, key: str, text: str):
    with pytest.raises(MatrixError) as caught:
        parse_matrix(copy.deepcopy(data), "some/file.toml")
    message = str(caught.value)
    assert message.startswith(f"some/file.toml: {key}: ")
    assert text in message
    assert "\n" not in message


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(MatrixError, match=r"broken\.toml: not valid TOML"):
        load_matrix(broken)
    with pytest.raises(MatrixError, match=r"absent\.toml: no such file; shipped: .*ci\.toml"):
        load_matrix(tmp_path / "absent.toml")


def test_a_shipped_matrix_is_found_by_its_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_matrix("ci.toml").name == "ci"


def test_base_and_case_together_make_the_case(tiny):
    gather, window, dense = tiny.groups[0].cases
    assert (gather.kind, gather.heads, gather.content) == (Kind.GATHER, 3, "messy")
    assert (window.kind, window.dtype, window.head_dim) == (Kind.WINDOW, "bfloat16", 16)
    assert dense.needs_grad == (False, False, False, False)
    assert gather.needs_grad == (True, True, True, True)


@pytest.mark.parametrize("name", shipped_matrices())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shipped_matrices_expand_on_both_devices(name: str, device: str):
    works, _ = expand(load_matrix(name), Selection(("eager", "triton"), device, 90))
    assert works
    ids = [cell.id for work in works for cell in work.cells]
    assert len(ids) == len(set(ids))


def test_the_ci_matrix_holds_every_axis_of_the_contract():
    works, _ = expand(load_matrix("ci.toml"), Selection(("eager",), "cpu"))
    cases = [work.case for work in works if isinstance(work, CaseWork)]
    layouts = {work.layout for work in works if isinstance(work, CaseWork)}
    assert layouts == {"BHSD", "BSHD", "SBHD", "THD"}
    assert {case.heads for case in cases} >= {1, 3, 16, 40, 64, 96, 128}
    assert {case.head_dim for case in cases} >= {16, 64, 80, 128, 192, 256, 512}
    assert {case.dtype for case in cases} == {"float64", "float32", "bfloat16", "float16"}
    assert {case.kind for case in cases} == set(Kind)
    assert {case.documents for case in cases} == {"none", "cu_seqlens", "doc_ids"}
    assert {case.sink for case in cases} == {"float32", "same", "none"}
    assert {case.index_dtype for case in cases} >= {"int32", "int64"}
    assert len({case.memory for case in cases}) == 5
    subsets = set(itertools.product((True, False), repeat=4))
    assert {case.needs_grad for case in cases if case.kind is Kind.GATHER} >= subsets
    assert any(case.deterministic for case in cases)


def test_the_ci_matrix_asks_interpreted_triton_for_nothing_it_does_not_claim(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    works, notes = expand(load_matrix("ci.toml"), Selection(("triton",), "cpu"))
    cases = [work.case for work in works if isinstance(work, CaseWork)]
    assert len(cases) > 80
    assert {case.dtype for case in cases} == {"bfloat16", "float16", "float32"}
    assert max(case.heads for case in cases) >= 128
    assert max(case.head_dim for case in cases) >= 512
    assert len(notes) == 1


def test_the_edge_matrix_holds_every_field_case():
    works, _ = expand(load_matrix("edge.toml"), Selection(("eager",), "cpu"))
    names = {work.case.name for work in works if isinstance(work, FieldWork)}
    dtypes = ("float32", "bfloat16", "float16", "float64")
    assert names == {case.name for case in field_cases(dtypes)}


def test_v4_sizes_are_full_on_a_gpu_and_short_on_a_cpu():
    matrix = load_matrix("dsv4.toml")
    full, _ = expand(matrix, Selection(("eager",), "cuda", 90))
    short, _ = expand(matrix, Selection(("eager",), "cpu"))
    sizes = {
        (w.case.heads, w.case.slots) for w in full if isinstance(w, CaseWork) and w.case.slots
    }
    assert sizes == {(64, 512), (128, 1024)}
    assert all(w.case.tokens == 4096 for w in full if isinstance(w, CaseWork))
    assert all(w.case.tokens <= 160 for w in short if isinstance(w, CaseWork))


def test_thd_is_taken_only_by_cases_without_a_batch():
    data = matrix(
        {
            "name": "g",
            "source": "list",
            "layouts": ["THD", "BSHD"],
            "cases": [{"batch": 2}, {"batch": 1, "seed": 1}, {"batch": 1, "seed": 2}],
        }
    )
    works, _ = expand(parse_matrix(data, "m.toml"), Selection(("eager",), "cpu"))
    assert [w.layout for w in works if isinstance(w, CaseWork)] == ["BSHD", "BSHD", "THD"]


def test_the_filter_and_repeated_cases_drop_cells():
    data = matrix(LIST, {**LIST, "name": "again"})
    works, _ = expand(parse_matrix(data, "m.toml"), Selection(("eager",), "cpu"))
    assert [cell.group for work in works for cell in work.cells] == ["g"]
    none, _ = expand(parse_matrix(data, "m.toml"), Selection(("eager",), "cpu", text="nowhere"))
    assert none == []
