"""KV gradients of the ordered Hopper backward, from rows as its kernel would have stored them."""

import pytest
import torch
from csa_backend_triton import hopper_ordered
from csa_backend_triton.hopper_operands import plan_of, slot_indices
from csa_backend_triton.operands import operands_of
from torch import Tensor

from csa_dispatch.call import Kind, token_bounds
from csa_dispatch.testing import Case, build, to_call, visible_rows

SMALL = {"dtype": "bfloat16", "head_dim": 512, "window": 7, "slots": 5, "pool": 9}
CASES = [
    Case(heads=1, tokens=20, content="messy", **SMALL),
    Case(heads=65, tokens=9, batch=2, content="duplicates", **SMALL),
    Case(heads=1, tokens=25, documents="cu_seqlens", **SMALL),
    Case(heads=1, tokens=12, batch=2, documents="doc_ids", **{**SMALL, "window": 1}),
    Case(kind=Kind.WINDOW, heads=1, tokens=70, **{**SMALL, "window": 66}),
    Case(heads=1, tokens=6, **{**SMALL, "window": 0}),
]


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_added_to_the_keys_that_they_belong_to(
    case: Case, chunk: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = to_call(build(case, device))
    bounds = token_bounds(call)
    plan = plan_of(call, bounds, *slot_indices(call))
    tokens, head_blocks = call.query.shape[2], -(-case.heads // 64)
    rows = case.batch * tokens
    monkeypatch.setattr(hopper_ordered, "chunk_tokens", lambda *_: min(chunk, rows))
    generator = torch.Generator().manual_seed(0)
    slots_from = 64 * -(-min(case.window, tokens) // 64)
    shape = (rows, head_blocks, slots_from + 64 * (case.kind is Kind.GATHER), 512)
    terms = torch.randint(-8, 9, shape, generator=generator).to(torch.bfloat16)
    # Columns as hopper_backward_scatter permutes them.
    stored = terms.unflatten(-1, (32, 2, 4, 2)).transpose(-3, -2).flatten(-4).to(device)

    def start(partial: Tensor, places: int, window_blocks: int, first: int, end: int) -> None:
        assert (places, 64 * window_blocks) == (shape[2], slots_from)
        partial.fill_(float("nan"))
        partial[: (end - first) * head_blocks] = stored[first:end].flatten(0, 1)

    needs_pool = call.sparse_kv is not None
    found = hopper_ordered.ordered_gradients(
        operands_of(call, bounds), plan, start, True, needs_pool
    )
    for name, right in zip(("local", "pool"), expected(case, call, plan, terms), strict=True):
        grad = found[0] if name == "local" else found[1]
        if grad is not None:
            assert torch.equal(grad[:, 0].float().cpu(), right), name


def expected(case: Case, call, plan: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of small integers: exact in fp32, whatever the order."""
    tokens = call.query.shape[2]
    local = torch.zeros(case.batch, tokens, 512)
    pool = torch.zeros(case.batch, max(case.pool, 1), 512)
    slots_from = terms.shape[2] - 64
    for b, by_token in enumerate(visible_rows(call)):
        for t, visible in enumerate(by_token):
            term = terms[b * tokens + t].float().sum(0)
            for place, row in enumerate(visible.local):
                local[b, row] += term[place]
            if call.kv_indices is None:
                continue
            _, _, pool_start, length = plan[:, b * tokens + t].tolist()
            for slot, index in enumerate(call.kv_indices[b, t].tolist()):
                if 0 <= index < length:
                    pool[b, pool_start + index] += term[slots_from + slot]
    return local.bfloat16().float(), pool.bfloat16().float()
