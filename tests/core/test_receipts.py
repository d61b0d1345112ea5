"""Receipts and the census: what really ran, from any thread."""

from __future__ import annotations

import threading

import torch

from csa_dispatch import attention, record_receipts, report, reset_report
from tests.core.probes import inputs


def test_census_counts_directions_and_ignores_step_sizes() -> None:
    reset_report()
    for tokens in (8, 9, 10):
        made = inputs(tokens=tokens, grad=True)
        attention(*made, sliding_window_size=3).sum().backward()
    counts = {(key.direction, key.backend): count for key, count in report().items()}
    assert counts == {("forward", "eager"): 3, ("backward", "eager"): 3}


def test_recorders_nest_and_carry_the_spec() -> None:
    made = inputs()
    with record_receipts() as outer:
        attention(*made, sliding_window_size=3)
        with record_receipts() as inner:
            attention(*made, sliding_window_size=4)
    assert [receipt.spec.window for receipt in outer] == [3, 4]
    assert [receipt.spec.window for receipt in inner] == [4]


def test_counts_are_exact_under_threads() -> None:
    reset_report()
    made = inputs()
    attention(*made, sliding_window_size=3)

    def many() -> None:
        torch.set_grad_enabled(False)
        for _ in range(200):
            attention(*made, sliding_window_size=3)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(report().values()) == 801
