"""cuDNN's own limits against our claims, and its kernels for SM100 and SM103 as machine code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from csa_backend_cudnn import backend
from csa_backend_cudnn.entry_points import availability

from csa_dispatch import CallSpec
from tests.backends.cudnn.lowering import KERNELS, SUPPORT
from tests.backends.cudnn.lowering_indexer import CALLS, CAPABILITIES

ROOT = Path(__file__).parents[3]
OURS_ALONE = {"SM90 backward, int64 slots"}
"""What the package refuses and the adapter never gives it, as it writes its own slots."""

NOT_TUNED = {"head_dim 64"}
"""What the package's scores take on SM100 beside the head_dim they say they are tuned for."""

FEW = {
    "sm_100a": ["forward, 64 heads", "backward, 64 heads"],
    "sm_103a": ["forward, 128 heads"],
}


def run(arch: str, *kernels: str, program: str = "lowering") -> list[list]:
    reason = availability().reason
    if reason is not None:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, "-m", f"tests.backends.cudnn.{program}", arch, *kernels],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def check(rows: list[list], arch: str, kernels: list[str]) -> None:
    """Each kernel was compiled for ``arch``, and uses its tensor cores."""
    found = {row[1]: row[2:] for row in rows if row[0] == "kernel"}
    assert sorted(found) == sorted(kernels)
    number = int(re.sub(r"\D", "", arch))
    for target, tensor_core, multiprocessor in found.values():
        assert target == arch
        assert tensor_core > 0
        assert multiprocessor == number


@pytest.mark.parametrize("arch", FEW)
def test_kernels_lower_and_the_package_supports_what_we_claim_and_no_less(arch: str):
    rows = run(arch, *FEW[arch])
    check(rows, arch, FEW[arch])
    said = {row[1]: row[2] for row in rows if row[0] == "support"}
    for name, (capability, sizes) in SUPPORT.items():
        words = {key: str(value).removeprefix("torch.") for key, value in sizes.items()}
        changes = {
            **sizes,
            "dtype": words.get("dtype", "bfloat16"),
            "index_dtype": words.get("index_dtype", "int32"),
        }
        spec = CallSpec(device_type="cuda", capability=capability[0] * 10 + capability[1])
        forward = "forward" in name
        side = backend.forward_capabilities if forward else backend.backward_capabilities
        claimed = not side.reasons(spec._replace(**changes)) and name not in OURS_ALONE
        assert (said[name] == "accepted") == claimed, (name, said[name])


@pytest.mark.slow
@pytest.mark.parametrize("arch", FEW)
def test_every_kernel_lowers(arch: str):
    check(run(arch, *KERNELS), arch, list(KERNELS))


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_the_indexers_kernels_lower_and_what_it_accepts_is_what_we_claim(arch: str):
    rows = run(arch, program="lowering_indexer")
    major, minor = CAPABILITIES[arch]
    claims = backend.operations["lightning_indexer"].forward_capabilities
    said = {row[1]: row[2] for row in rows if row[0] == "call"}
    assert set(said) == {case.name for case in CALLS}
    for case in CALLS:
        claimed = not claims.reasons(case.spec("cuda", major * 10 + minor))
        accepted = said[case.name] == "accepted"
        assert accepted == claimed or (accepted and case.name in NOT_TUNED), said[case.name]
    kernels = [row[1:] for row in rows if row[0] == "kernel"]
    assert {name for name, *_ in kernels} == {"scores", "top_k"}
    for name, target, tensor_core, multiprocessor in kernels:
        assert target == arch
        assert multiprocessor == major * 10 + minor
        assert (tensor_core > 0) == (name == "scores")
