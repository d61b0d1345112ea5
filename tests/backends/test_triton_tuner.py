"""The tuner: what it tries, what it keeps, what it writes. Times are a GPU's matter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from csa_backend_triton import load_tiles
from csa_backend_triton.tile_table import forward_tile
from csa_backend_triton.tuner import (
    Entry,
    Place,
    candidates,
    capped,
    choose,
    entry_at,
    put,
    save_tiles,
    tunable,
    tune,
)

from csa_dispatch import CallSpec

PLACE = Place("forward", "hopper", 128, 16)


@pytest.fixture(autouse=True)
def known_entry() -> Iterator[None]:
    shipped = entry_at(PLACE)
    put(PLACE, (64, 4, 3))
    yield
    put(PLACE, shipped)


def test_candidates_start_with_the_entry_and_stay_sensible() -> None:
    found = candidates((64, 4, 3, 168))
    assert found[0] == (64, 4, 3, 168)
    assert (32, 8, 2) in found
    assert len(set(found)) == len(found)
    for keys, warps, stages, *_ in found:
        assert 16 <= keys <= 128
        assert warps in (4, 8)
        assert 1 <= stages <= 4


@pytest.mark.parametrize(("milliseconds", "kept"), [(0.5, True), (0.99, False)])
def test_a_tile_replaces_the_tables_when_it_is_worth_it(milliseconds: float, kept: bool) -> None:
    before = entry_at(PLACE)
    other = next(entry for entry in candidates(before) if entry != before)

    def times(entries: list[Entry]) -> dict[Entry, float]:
        put(PLACE, entries[-1])  # as measuring does
        return {before: 1.0, other: milliseconds}

    assert choose(PLACE, times) == (other if kept else before)
    assert entry_at(PLACE) == (other if kept else before)


def test_the_best_tiles_are_tried_with_caps_on_registers() -> None:
    assert capped((32, 4, 2)) == [(32, 4, 2, 168), (32, 4, 2, 128)]
    assert capped((32, 8, 2, 168)) == [(32, 8, 2, 128), (32, 8, 2, 80)]
    rounds: list[list[Entry]] = []

    def times(entries: list[Entry]) -> dict[Entry, float]:
        assert entry_at(PLACE) == (64, 4, 3)  # what results are compared with
        rounds.append(entries)
        put(PLACE, entries[-1])
        cost = {(32, 4, 2): 0.8, (32, 4, 3): 0.85, (64, 8, 3): 0.9, (32, 4, 3, 128): 0.7}
        return {entry: cost.get(entry, 1.0) for entry in entries}

    assert choose(PLACE, times) == entry_at(PLACE) == (32, 4, 3, 128)
    assert len(rounds) == 2
    assert rounds[1][:4] == [(64, 4, 3), (32, 4, 2), (32, 4, 3), (64, 8, 3)]
    assert len(rounds[1]) == len(set(rounds[1])) == 10


def test_what_cannot_be_compared_changes_nothing() -> None:
    before = entry_at(PLACE)
    assert choose(PLACE, lambda entries: {entries[-1]: 1.0}) == before
    assert entry_at(PLACE) == before


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        ("Kind.GATHER", "('forward', 'hopper', 256, 16)"),
        ("Kind.WINDOW", "('packed_forward', 'hopper', 256, 128)"),
    ],
)
def test_places_are_those_of_the_kernels_a_call_launches(kind: str, forward: str) -> None:
    program = (
        "from csa_backend_triton.tuner import places\n"
        "from csa_dispatch import CallSpec, Kind\n"
        "from triton.runtime.driver import driver\n"
        "from cross_compile import CompileOnlyDriver\n"
        "driver.set_active(CompileOnlyDriver(90))\n"
        f"kind = {kind}\n"
        "call = CallSpec(heads=16, head_dim=256, capability=90)\n"
        "call = call._replace(needs_grad=(True, True, kind is Kind.GATHER, True))\n"
        "window = dict(kind=kind, pool=0, slots=0, index_dtype='none')\n"
        "spec = call if kind is Kind.GATHER else call._replace(**window)\n"
        "print(sorted(tuple(place) for place in places(spec)))\n"
    )
    folder = Path(__file__).parent / "triton"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = run.stdout.strip()
    assert forward in found
    assert found.count("forward") == 1
    assert "'token_gradient'" in found


def test_saved_tiles_take_effect_when_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "tiles.json")
    save_tiles(path, [(PLACE, (32, 8, 2, 168))])
    assert forward_tile(90, 128, 16, False).keys == 64
    assert load_tiles(path) == 1
    assert forward_tile(90, 128, 16, False) == (16, 32, 8, 2, 168)


@pytest.mark.parametrize(
    "change",
    [
        {"family": "ampere"},
        {"rows": 17},
        {"entry": [32, 8]},
        {"entry": [32, 8, "2"]},
        {"entry": [32, 8, True]},
        {"entry": [33, 8, 2]},
        {"entry": [32, 3, 2]},
        {"entry": [32, 8, 0]},
        {"entry": [32, 8, 2, 4]},
        {"entry": [32, 8, 2, 168, 168]},
        {"entry": [64, 16, 3, 255]},
        {"entry": "abc"},
        {"entry": [8, 8, 2]},
        {"entry": [32, 8, 5]},
        {"head_dim": 128.0},
        {"table": 1},
    ],
)
def test_other_files_are_refused_whole(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "tiles.json"
    save_tiles(str(path), [(PLACE, (32, 8, 2)), (PLACE, (32, 8, 2))])
    data = json.loads(path.read_text())
    data[1] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="not tiles of csa_backend_triton"):
        load_tiles(str(path))
    assert entry_at(PLACE) == (64, 4, 3)


@pytest.mark.parametrize("text", ["{}", '""', "[" * 3000, "[1]", "\0"])
def test_a_file_of_no_tiles_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not tiles of csa_backend_triton") as caught:
        load_tiles(str(path))
    assert len(str(caught.value)) < 400 + len(str(path))


def test_an_interrupted_choice_leaves_the_table_as_it_was() -> None:
    before = entry_at(PLACE)

    def times(entries: list[Entry]) -> dict[Entry, float]:
        put(PLACE, entries[-1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(PLACE, times)
    assert entry_at(PLACE) == before


def test_families_have_entries_of_their_own() -> None:
    before = {kind: forward_tile(kind, 256, 64, False) for kind in (80, 86, 90, 100)}
    place = Place("forward", "hopper", 256, 64)
    shipped = entry_at(place)
    put(place, (32, 4, 1))
    after = {kind: forward_tile(kind, 256, 64, False) for kind in before}
    put(place, shipped)
    assert {kind for kind in before if before[kind] != after[kind]} == {90}


def test_calls_of_the_hopper_kernels_are_not_tuned() -> None:
    hopper = CallSpec(capability=90, needs_grad=(True,) * 4)
    with pytest.raises(ValueError, match="spec is a call of the Hopper kernels"):
        tunable(hopper)


def test_loaded_tiles_reach_other_processes() -> None:
    code = (
        "from csa_backend_triton.tile_table import TABLES, forward_tile, take_tables\n"
        "import pickle\n"
        "tables = pickle.loads(pickle.dumps(TABLES))\n"
        "tables['forward']['hopper'][128][16] = (32, 8, 1)\n"
        "take_tables(tables)\n"
        "assert forward_tile(90, 128, 16, False) == (16, 32, 8, 1, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_tuning_needs_a_gpu_and_a_call_that_has_choices() -> None:
    with pytest.raises(ValueError, match="dtype is 'float32'"):
        tune(CallSpec(dtype="float32"))
    with pytest.raises(ValueError, match="kv_heads is 5"):
        tune(CallSpec(kv_heads=5))
