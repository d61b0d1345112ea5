"""What ``check_values`` reads on the host: offsets, ids and indices that metadata cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import csa_dispatch
from csa_dispatch import attention
from tests.core.test_validation import OFFSETS, arguments, check_form

OF_TWO_POOLS = torch.tensor([[[3, 3]] * 4 + [[1, 2], [3, 1], [1, 1], [1, 1]]])
"""Right for the first document's pool of 4; of the second's 2 a token asks a third."""

VALUE_FAULTS = {
    "start": ({"cu_seqlens": torch.tensor([1, 4, 8])}, "cu_seqlens is 1 at its start"),
    "pool start": ({"cu_seqlens_k": torch.tensor([-1, 3, 6])}, "cu_seqlens_k is -1 at its start"),
    "decrease": ({"cu_seqlens": torch.tensor([0, 6, 4])}, "cu_seqlens is 6, 4"),
    "decrease by 1": ({"cu_seqlens": torch.tensor([0, 5, 4])}, "cu_seqlens is 5, 4"),
    "past the end": ({"cu_seqlens": torch.tensor([0, 4, 9])}, "cu_seqlens is 9 at its end"),
    "pool end": ({"cu_seqlens_k": torch.tensor([0, 3, 7])}, "cu_seqlens_k is 7 at its end"),
    "index": ({"kv_indices": torch.full((1, 8, 2), 3)}, r"kv_indices is 3 at \[0, 0, 0\]"),
    "index of the first token of a document": (
        {"kv_indices": OF_TWO_POOLS, "cu_seqlens_k": torch.tensor([0, 4, 6])},
        r"kv_indices is 2 at \[0, 4, 1\]; it must be under 2,",
    ),
}


@pytest.mark.parametrize("name", VALUE_FAULTS)
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_check_values_reads_offsets_and_indices(name: str, how: str, environment: Any) -> None:
    changes, message = VALUE_FAULTS[name]
    offsets = {"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([0, 3, 6])}
    indices = torch.zeros(1, 8, 2, dtype=torch.int64)
    made = arguments(**{"kv_indices": indices, **offsets, **changes})
    for key in ("cu_seqlens", "cu_seqlens_k"):
        made[key] = made[key].to(torch.int32)
    if how == "environment":
        environment("CSA_DISPATCH_CHECK_VALUES", "1")
    with pytest.raises(ValueError, match=message) as caught:
        attention(**made, check_values=True if how == "argument" else None)
    check_form(str(caught.value))


def test_check_values_of_the_environment_holds_for_plans(environment: Any) -> None:
    made = arguments(kv_indices=torch.full((1, 8, 2), 6))
    plan = csa_dispatch.resolve(**made)
    plan(**made)
    environment("CSA_DISPATCH_CHECK_VALUES", "1")
    with pytest.raises(ValueError, match="kv_indices is 6"):
        plan(**made)


def test_check_values_passes_good_calls_and_decreasing_ids_fail() -> None:
    attention(**arguments(), check_values=True)
    begun_before = torch.tensor([-3, 4, 8], dtype=torch.int32)
    pool_offsets = torch.tensor([0, 3, 6], dtype=torch.int32)
    packed = arguments(
        kv_indices=torch.zeros(1, 8, 2, dtype=torch.int64),
        cu_seqlens=begun_before,
        cu_seqlens_k=pool_offsets,
    )
    attention(**packed, check_values=True)
    pools = {"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([0, 4, 6], dtype=torch.int32)}
    last_rows = OF_TWO_POOLS.clamp(max=1) + torch.tensor([2] * 4 + [0] * 4)[None, :, None]
    attention(**arguments(kv_indices=last_rows, **pools), check_values=True)
    # Tokens behind the last document may name any row.
    last_rows[:, 6:] = 5
    pools["cu_seqlens"] = torch.tensor([0, 4, 6], dtype=torch.int32)
    attention(**arguments(kv_indices=last_rows, **pools), check_values=True)
    ids = torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2]])
    with pytest.raises(ValueError, match=r"doc_ids is decreasing at \[0, 4\]"):
        attention(**arguments(doc_ids=ids), check_values=True)
