"""An attention layer of transformers' DeepSeek-V4 before and after ``enable``: time and memory.

    python tests/benchmarks/transformers_layer.py [--tokens 2048 4096] [--flash] [--dtype bfloat16]
        [--kinds compressed_sparse_attention] [--device cuda] [--rounds N] [--cpu-time]
        [--json FILE]

Forward and backward of one layer on the same hidden states and weights; a window-only layer also
as ``register_attention`` serves it. The plain layer gets the dense mask that transformers builds
once for all layers; building it is in neither time nor memory. Rounds of the forms are interleaved
and the least time of each is taken. Peak memory is what the call allocates beyond what it returns
(``csa_dispatch.bench.memory``). A form that runs out of memory is reported as such;
``--limit-gib`` sets a limit on a CPU. On a busy machine, ``OMP_NUM_THREADS=1`` and ``--cpu-time``
take what others do out of the times.

``--flash`` takes V4-Flash's sizes (64 heads of 512), else 16 heads of 128.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

from csa_dispatch import record_receipts
from csa_dispatch.bench.memory import extra_memory
from csa_dispatch.integrations.transformers import enable, register_attention

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 256,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_head_dim": 64,
}


class Row(NamedTuple):
    """One measurement; time and memory are None when memory ran out.

    Attributes:
        difference: of the output from the plain form's, relative Frobenius norm.
    """

    form: str
    kind: str
    tokens: int
    dtype: str
    milliseconds: float | None
    mebibytes: float | None
    backends: list[str]
    difference: float | None


class Forms:
    """A layer in its forms, on one input."""

    def __init__(self, options: argparse.Namespace, kind: str, tokens: int) -> None:
        self.device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        config = transformers.DeepseekV4Config(
            num_hidden_layers=1,
            layer_types=[kind],
            **({} if options.flash else SMALL),
        )
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        configs = {"plain": config, "enabled": config}
        if kind == KINDS[0]:
            configs["registered"] = copy.deepcopy(config)
            configs["registered"]._attn_implementation = register_attention()
        with self.device:
            self.layers = {form: DeepseekV4Attention(of, 0) for form, of in configs.items()}
            plain = self.layers["plain"]
            for name, weight in plain.named_parameters():
                deviation = 0.02 if weight.ndim > 1 else 0.0
                torch.nn.init.normal_(weight, mean=float("norm" in name), std=deviation)
            plain.to(dtype)
            for name, weight in plain.named_parameters():
                if "norm" in name or "sinks" in name or "position_bias" in name:
                    weight.data = weight.data.float()
            self.x = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
            self.upstream = torch.randn_like(self.x)
            rotary = DeepseekV4RotaryEmbedding(config)
            self.positions = torch.arange(tokens)[None]
            self.rotations = {
                kind: rotary(self.x, self.positions, layer_type=kind)
                for kind in ("main", "compress")
            }
        for layer in self.layers.values():
            for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
                ours.data = theirs.data
        enable(self.layers["enabled"])
        self.window, self.tokens, self.dtype = config.sliding_window, tokens, dtype

    def mask(self) -> Tensor:
        """transformers' dense additive mask ``[1, 1, T, T]``."""
        token = torch.arange(self.tokens, device=self.device)
        distance = token[:, None] - token
        hidden = (distance < 0) | (distance >= self.window)
        least = torch.finfo(self.dtype).min
        return torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, least)[None, None]

    def run(self, form: str, mask: Tensor | None) -> list[Tensor]:
        """Forward and backward: output and gradients."""
        layer = self.layers[form]
        output = layer(self.x, self.rotations, self.positions, mask)[0]
        leaves = [self.x, *(w for name, w in layer.named_parameters() if "indexer" not in name)]
        return [output, *torch.autograd.grad(output, leaves, self.upstream)]


def seconds(device: torch.device, clock: Callable[[], float], run: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(options: argparse.Namespace, kind: str, tokens: int) -> list[Row]:
    forms, rows = Forms(options, kind, tokens), []
    masks = {form: forms.mask() if form == "plain" else None for form in forms.layers}
    times: dict[str, list[float]] = {name: [] for name in masks}
    peaks: dict[str, int] = {}
    lost: set[str] = set()
    backends: dict[str, set[str]] = {}

    def attempt(form: str, call: Callable[[], object]) -> Any:
        if form in lost:
            return None
        try:
            return call()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "memory" not in str(error):
                raise
            lost.add(form)
            return None

    def keep_output(form: str) -> list[Tensor]:
        results = forms.run(form, masks[form])
        outputs[form] = results[0].detach()
        return results

    outputs: dict[str, Tensor] = {}
    for form in masks:
        with record_receipts() as receipts:
            run = partial(keep_output, form)
            peaks[form] = attempt(form, partial(extra_memory, run, forms.device))
        backends[form] = {f"{type(r.spec).__name__}:{r.direction}:{r.backend}" for r in receipts}
    differences: dict[str, float] = {}
    if "plain" in outputs:
        plain = outputs["plain"].double()
        for form, output in outputs.items():
            differences[form] = ((output - plain).norm() / plain.norm()).item()
    outputs.clear()
    clock = time.process_time if options.cpu_time else time.perf_counter
    for _ in range(options.rounds):
        for form, mask in masks.items():
            run = partial(forms.run, form, mask)
            taken = attempt(form, partial(seconds, forms.device, clock, run))
            if taken is not None:
                times[form].append(taken)
    for form in masks:
        gone = form in lost
        rows.append(
            Row(
                form,
                kind,
                tokens,
                options.dtype,
                None if gone else 1e3 * min(times[form]),
                None if gone else peaks[form] / 2**20,
                sorted(backends[form]),
                differences.get(form),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=[KINDS[1]])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of the process, not wall time")
    parser.add_argument("--limit-gib", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.limit_gib:
        resource.setrlimit(resource.RLIMIT_AS, (options.limit_gib * 2**30,) * 2)
    rows: list[Row] = []
    for kind, tokens in product(options.kinds, options.tokens):
        for row in measure(options, kind, tokens):
            rows.append(row)
            if row.milliseconds is None:
                figures = "out of memory"
            else:
                figures = f"{row.milliseconds:10.1f} ms {row.mebibytes:10.0f} MiB"
            print(f"{row.kind} T={tokens} {row.dtype} {row.form:10} {figures}", flush=True)
            if row.form != "plain":
                print("  ", *row.backends, "difference", row.difference, flush=True)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
