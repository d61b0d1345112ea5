"""The Triton kernels among guards: what only memory tricks can show."""

from __future__ import annotations

from csa_backend_triton import backend

from csa_dispatch.testing import check_backend

CHECKS = ("statement", "nan", "results", "inputs", "canaries", "aliasing", "unwritten")


def test_the_kernels_keep_to_their_memory(device: str) -> None:
    check_backend(backend, device, checks=CHECKS).raise_if_failed()
