"""One enabled CSA layer needs a fraction of the plain layer's memory, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.24")

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "transformers_layer.py"


@pytest.mark.serial
def test_peak_memory_of_a_csa_layer_falls_at_least_fivefold(tmp_path: Path):
    path = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--tokens", "1536", "--rounds", "1"]
    subprocess.run([*command, "--json", str(path)], check=True, capture_output=True, timeout=300)
    plain, enabled = json.loads(path.read_text())
    assert (plain["form"], enabled["form"]) == ("plain", "enabled")
    assert enabled["difference"] < 1e-4
    assert 5 * enabled["mebibytes"] < plain["mebibytes"]
