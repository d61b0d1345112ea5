"""What the backend claims, before any kernel is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from csa_backend_triton import backend
from csa_backend_triton.operands import split_head_dim, with_unit_columns

from csa_dispatch.call_spec import CallSpec


def in_fresh_process(code: str) -> str:
    """What ``code`` prints in a process that neither interprets nor has imported triton."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_the_package_and_probing_do_not_import_triton() -> None:
    code = (
        "import sys; from csa_backend_triton import backend; backend.probe(); "
        "print('triton' in sys.modules)"
    )
    assert in_fresh_process(code) == "False"


def test_the_cpu_is_refused_unless_interpreted_and_the_reason_says_how() -> None:
    code = (
        "from csa_backend_triton import backend; from csa_dispatch.call_spec import CallSpec; "
        "print(*backend.forward_capabilities.reasons(CallSpec(device_type='cpu')))"
    )
    assert "device_type is cpu" in in_fresh_process(code)
    assert "TRITON_INTERPRET=1" in in_fresh_process(code)


def test_old_cards_are_refused() -> None:
    spec = CallSpec(device_type="cuda", capability=75)
    (reason,) = backend.forward_capabilities.reasons(spec)
    assert reason.field == "capability"


@pytest.mark.parametrize("found", [None, "3.5.1"])
def test_a_missing_or_old_triton_is_a_reason(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    reason = backend.probe().reason
    assert reason is not None
    assert "3.6" in reason.required


def test_head_dim_parts_cover_it_in_powers_of_two_of_64_or_more() -> None:
    for size in range(1, 577):
        _, first, second = split_head_dim(size)
        assert first + second >= size
        assert first in (64, 128, 256, 512)
        assert second in (0, 64, 128)


def test_scattered_columns_are_copied_without_multiplying_expanded_rows() -> None:
    kv = torch.randn(1, 1, 8, 6).transpose(2, 3).expand(5, 3, 6, 8)
    copied = with_unit_columns(kv)
    assert torch.equal(copied, kv)
    assert copied.stride(-1) == 1
    assert copied.untyped_storage().nbytes() == 6 * 8 * 4


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_every_head_count_and_head_dim_is_claimed_from_sm80_on(capability: int) -> None:
    spec = CallSpec(device_type="cuda", capability=capability)
    for heads, head_dim in ((1, 16), (31, 80), (64, 576), (256, 96)):
        asked = spec._replace(heads=heads, head_dim=head_dim)
        assert backend.forward_capabilities.reasons(asked) == ()
        assert backend.backward_capabilities.reasons(asked) == ()
    outside = spec._replace(heads=257, head_dim=577)
    reasons = backend.forward_capabilities.reasons(outside)
    assert {reason.field for reason in reasons} == {"heads", "head_dim"}
    turing = backend.forward_capabilities.reasons(spec._replace(capability=75))
    assert [reason.field for reason in turing] == ["capability"]
