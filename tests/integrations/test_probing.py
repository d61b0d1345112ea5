"""Absent, old and changed transformers are named before anything is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from csa_dispatch.integrations.transformers import enable
from csa_dispatch.integrations.transformers.probing import v4_modeling

transformers = pytest.importorskip("transformers", minversion="5.24")


def test_a_part_that_is_gone_is_named(make_model, monkeypatch):
    model = make_model()
    monkeypatch.setattr(model.model.layers[1].self_attn.compressor.indexer.scorer, "_modules", {})
    with pytest.raises(ImportError, match=r"lacks scorer\.weights_proj"):
        enable(model)
    assert all("forward" not in part.__dict__ for part in model.modules())


def test_an_older_signature_is_named(monkeypatch):
    modeling = v4_modeling()
    monkeypatch.setattr(
        modeling.DeepseekV4Attention, "forward", lambda self, x, past_key_values=None: x
    )
    with pytest.raises(ImportError, match=r"DeepseekV4Attention\.forward's argument cache"):
        v4_modeling()


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("transformers", "install csa-dispatch[transformers]"),
        ("transformers.models.deepseek_v4", "has no DeepSeek-V4 model; install transformers>=5"),
    ],
)
def test_absence_is_an_import_error_at_enable_alone(absent, words):
    code = f"""
import sys
sys.modules[{absent!r}] = None
import torch
from csa_dispatch.integrations.transformers import enable
try:
    enable(torch.nn.Linear(2, 2))
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert words in done.stdout, done.stderr
