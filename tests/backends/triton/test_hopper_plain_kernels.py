"""The plain Triton kernels around the Hopper ones: plan and cast."""

import pytest
import torch
from csa_backend_triton.hopper_operands import cast_rows, plan_of, slot_indices

from csa_dispatch.call import Call, Kind, token_bounds
from csa_dispatch.testing import Case, build, to_call, visible_rows


def planned(call: Call) -> torch.Tensor:
    return plan_of(call, token_bounds(call), *slot_indices(call)).cpu()


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=1, head_dim=16, tokens=150, window=128, slots=70, pool=40, content="random"),
        Case(heads=1, head_dim=16, tokens=50, window=3, slots=300, content="scattered", batch=2),
        Case(heads=1, head_dim=16, window=0, slots=5, content="messy", index_dtype="int64"),
        Case(heads=1, head_dim=16, tokens=90, window=70, documents="cu_seqlens", content="messy"),
        Case(heads=1, head_dim=16, batch=2, window=9, documents="doc_ids", content="messy"),
        Case(heads=1, head_dim=16, memory="transposed", batch=2),
        Case(kind=Kind.WINDOW, heads=1, head_dim=16, tokens=90, window=200),
    ],
    ids=lambda case: case.name,
)
def test_plan_covers_what_each_token_sees(case: Case, device: str) -> None:
    inputs = build(case, device)
    call = to_call(inputs)
    plan = planned(call)
    tokens = call.query.shape[2]
    for b, rows in enumerate(visible_rows(call)):
        for t, visible in enumerate(rows):
            blocks, window_rows, pool_start, pool_length = plan[:, b * tokens + t].tolist()
            assert visible.local == list(range(t + 1 - window_rows, t + 1))
            end, chosen = 0, []
            if call.kv_indices is not None:
                for slot, index in enumerate(call.kv_indices[b, t].tolist()):
                    if 0 <= index < pool_length:
                        chosen.append(pool_start + index)
                        end = slot + 1
            assert sorted(visible.pool) == sorted(chosen)
            assert blocks == -(-window_rows // 64) + -(-end // 64)


@pytest.mark.parametrize("head_dim", [128, 512])
def test_cast_puts_the_accumulators_columns_in_order(head_dim: int, device: str) -> None:
    # Lane q of a quad holds columns 8 i + 2 q + e; i = 2 g + h; it stores them at 16 g + 4 q.
    columns = torch.arange(head_dim).reshape(-1, 2, 4, 2)  # g, h, q, e
    stored = columns.permute(0, 2, 1, 3).reshape(-1)
    rows = torch.randn(2 * 9, head_dim, device=device)
    like = torch.empty(2, 1, 9, head_dim, dtype=torch.float16, device=device)
    gradient = cast_rows(rows[:, stored.to(device)].contiguous(), like)
    assert torch.equal(gradient.reshape(18, head_dim), rows.half())
