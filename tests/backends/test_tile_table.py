"""Every head dimension, group and card has a tile of its own kind."""

from __future__ import annotations

import pytest
from csa_backend_triton.tile_table import (
    PACKED_FORWARD,
    TABLES,
    Tile,
    family,
    forward_tile,
    head_dim_class,
    key_gradient_tile,
    token_gradient_tile,
)

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)


def tiles(capability: int, head_dim: int, float32: bool) -> list[Tile]:
    found = [key_gradient_tile(capability, head_dim, float32)]
    for rows in (1, 16, 24, 64, 256):
        found.append(token_gradient_tile(capability, head_dim, rows, float32))
        for packed in (False, True):
            found.append(forward_tile(capability, head_dim, rows, float32, packed))
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_call_has_a_tile_that_can_be(capability: int) -> None:
    for head_dim in range(1, 577):
        for float32 in (False, True):
            for rows, keys, warps, stages, registers in tiles(capability, head_dim, float32):
                assert rows in (8, 16, 32, 64, 128)
                assert keys in (8, 16, 32, 64, 128)
                assert warps in (4, 8, 16)
                assert 1 <= stages <= 3
                assert registers * 32 * warps <= 65536


@pytest.mark.parametrize("name", sorted(TABLES))
def test_rows_read_by_elements_have_tiles_of_their_own_on_hopper(name: str) -> None:
    table = TABLES[name]["hopper"]
    for head_dim in range(1, 577):
        uneven = head_dim % 16 != 0
        assert (head_dim_class(table, head_dim) % 16 != 0) == uneven, head_dim
        if uneven:
            entries = table[head_dim_class(table, head_dim)].values()
            assert {stages for _, _, stages, *_ in entries} == {1}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tiles_of_several_tokens_are_chosen_apart_where_they_were_measured(
    capability: int,
) -> None:
    packed = forward_tile(capability, 512, 64, False, packed=True)
    if family(capability) in PACKED_FORWARD:
        assert packed == (64, *PACKED_FORWARD[family(capability)][512][64], 0)
    else:
        assert packed == forward_tile(capability, 512, 64, False)
