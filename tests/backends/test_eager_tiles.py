"""The eager backend's cuts: many tiles, many segments, and what lies on their edges.

Generated cases are short, for the oracle's and the interpreter's sake; these are as long as it
takes to cross every boundary that ``tiles`` draws, several times.
"""

from __future__ import annotations

import csa_backend_eager
import pytest
from csa_backend_eager import plugin, tiles
from csa_backend_eager.dense import CountedBranch, DenseBranch
from csa_backend_eager.gathered import GatheredBranch
from csa_backend_eager.plugin import branches
from csa_backend_eager.window import WindowBranch
from csa_backend_eager.workspace import Workspace

from csa_dispatch import Kind
from csa_dispatch.testing import Case, backend_run, build, check_case, to_call

RUN = backend_run(csa_backend_eager.backend)
SMALL = 2**16


def long_case(kind: Kind, **changes: object) -> Case:
    """More tokens than a tile has, a pool that lasts to the end, and several segments of slots."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "tokens": tiles.TILE_TOKENS + 77}
    keys = {"pool": 200, "slots": 40, "window": 40, "compress_ratio": 3}
    return Case(kind=kind, **{**sizes, **keys, **changes})  # pyright: ignore[reportArgumentType]


CASES = [
    (long_case(kind, documents=documents), counted)
    for kind in Kind
    for documents in ("none", "cu_seqlens", "doc_ids")
    for counted in ((False, True) if kind is Kind.GATHER else (False,))
]
IDS = [f"{case.kind.value}-{case.documents}-{'counted' * counted}" for case, counted in CASES]


@pytest.mark.parametrize("workspace", [tiles.WORKSPACE_BYTES, SMALL])
@pytest.mark.parametrize(("case", "counted"), CASES, ids=IDS)
def test_long_calls_are_within_budget(
    case: Case, counted: bool, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(plugin, "counting_is_faster", lambda *_: counted)
    result = check_case(case, RUN)
    assert result.status == "pass", result.message


@pytest.mark.parametrize("kind", list(Kind))
def test_batches_share_tiles_and_are_cut_too(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "counting_is_faster", lambda *_: False)
    case = long_case(kind, batch=5, tokens=tiles.TILE_TOKENS // 2 - 3)
    assert len({tile.batches for tile in tiles.tiles(to_call(build(case)))}) == 2
    result = check_case(case, RUN)
    assert result.status == "pass", result.message


def test_these_cases_cross_every_kind_of_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    call = to_call(build(long_case(Kind.WINDOW)))
    cut = list(tiles.tiles(call))
    assert len(cut) >= 2
    assert max(tile.blocks for tile in cut) >= 3
    assert min(tile.block_tokens for tile in cut) < tiles.block_tokens(call.sliding_window_size)
    monkeypatch.setattr(tiles, "WORKSPACE_BYTES", SMALL)
    expected = {
        Kind.WINDOW: (WindowBranch, 1),
        Kind.DENSE: (DenseBranch, 3),
        Kind.GATHER: (GatheredBranch, 3),
    }
    for counted in (False, True):
        monkeypatch.setattr(plugin, "counting_is_faster", lambda *_, counted=counted: counted)
        for kind, (branch_type, least) in expected.items():
            call = to_call(build(long_case(kind)))
            branch = branches(call, Workspace(call.query.device))[-1]
            if kind is Kind.GATHER and counted:
                branch_type = CountedBranch
            assert type(branch) is branch_type
            most = max(sum(1 for _ in branch.segments(tile)) for tile in tiles.tiles(call))
            assert most >= least
