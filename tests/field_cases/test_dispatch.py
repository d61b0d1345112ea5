"""G33: a forced backend that can't run a call says which constraint; automatic choice runs."""

from __future__ import annotations

import pytest

from csa_dispatch import (
    Capabilities,
    OneOf,
    record_receipts,
    use_policy,
)
from csa_dispatch.testing import Case, PlainBackend, attention_run, check_case

HEADS = OneOf((64, 128), others=(63, 65))


class NarrowBackend(PlainBackend):
    """Right wherever it runs, but only for 64 or 128 heads, in one direction or both."""

    def __init__(self, *, forward: bool, backward: bool) -> None:
        super().__init__()
        self.name = "narrow"
        self.forward_capabilities = Capabilities(heads=HEADS if forward else OneOf((3, 64)))
        self.backward_capabilities = Capabilities(heads=HEADS if backward else OneOf((3, 64)))


SIDES = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize(("forward", "backward"), SIDES)
def test_forced_backend_names_the_constraint_and_nothing_runs(registered, forward, backward):
    registered(NarrowBackend(forward=forward, backward=backward))
    with record_receipts() as receipts:
        result = check_case(Case(heads=3), attention_run("narrow"))
    assert result.status == "unsupported"
    assert "heads is 3; needs 64 or 128" in result.message
    assert receipts == []


def test_a_forward_whose_backward_cannot_run_is_fine_without_gradients(registered):
    registered(NarrowBackend(forward=False, backward=True))
    case = Case(heads=3, needs_grad=(False,) * 4)
    with record_receipts() as receipts:
        assert check_case(case, attention_run("narrow")).status == "pass"
    assert [receipt.backend for receipt in receipts] == ["narrow"]


@pytest.mark.parametrize(("forward", "backward"), SIDES)
@pytest.mark.parametrize(("heads", "chosen"), [(3, "eager"), (64, "narrow")])
@pytest.mark.filterwarnings("ignore::csa_dispatch.FallbackWarning")
def test_automatic_choice_runs_is_right_and_leaves_a_receipt(
    registered, tmp_path, forward, backward, heads, chosen
):
    registered(NarrowBackend(forward=forward, backward=backward))
    policy = tmp_path / "narrow_first.toml"
    policy.write_text('name = "narrow first"\n[[rule]]\nprefer = ["narrow", "eager"]\n')
    with use_policy(str(policy)), record_receipts() as receipts:
        result = check_case(Case(heads=heads, head_dim=16), attention_run())
    assert result.status == "pass", result.message
    ran = {receipt.direction: receipt.backend for receipt in receipts}
    assert ran == {"forward": chosen, "backward": chosen}
