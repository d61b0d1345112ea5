"""Hold the fused side's adapter to the oracle, with a version's reference in its kernels' place.

    python through_the_library.py [FOLDER]

FOLDER is where another attn-gym is installed. Its public ``gather_attn`` checks and computes what
the adapter makes of a call, on a CPU; only ``impl`` and ``kernel_options`` differ. float32, since
the reference rounds KV gradients of packed calls in between. Prints a JSON object.
"""

from __future__ import annotations

import json
import sys

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])

from csa_backend_attention_gym import AttentionGymBackend, fused
from csa_backend_attention_gym.features import features
from torch import Tensor

from csa_dispatch import Call, CallSpec, Capabilities, Gradients, Kind, OneOf, explain
from csa_dispatch.testing import Case, backend_run, cases_for, check_case


class Fused(AttentionGymBackend):
    """The fused side on any device."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return fused.forward(call, "generic", True)

    def backward(
        self,
        call: Call,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        return fused.backward(call, grad_output, needs, "generic", True)


def main() -> None:
    fused.IMPL = "reference"
    claim = Capabilities(
        dtype=OneOf(("float32",)), documents=OneOf(("none", "cu_seqlens")), kv_heads=OneOf((1,))
    )
    axes = {"tokens": (14, 1), "heads": (4, 1, 16), "head_dim": (16,), "kv_heads": (1,)}
    cases = cases_for(claim, claim, axes=axes, strength=1)
    for documents in ("none", "cu_seqlens"):
        for kind in (Kind.GATHER, Kind.DENSE):
            small = Case(kind, tokens=14, head_dim=16, content="nan", documents=documents)
            cases.append(small)
    cases.append(Case(tokens=14, head_dim=16, heads=2, kv_heads=2))
    run = backend_run(Fused())
    results = [check_case(case, run) for case in cases]
    small = CallSpec(slots=8, needs_grad=(False,) * 4)
    found = {
        "version": features().version,
        "packed_offsets": features().packed_offsets,
        "cases": len(results),
        "failed": [f"{item.name}: {item.message}" for item in results if item.status != "pass"],
        "here": [str(item) for item in Fused().probe().reason or ()],
        "cuda": explain(small, device="sm_90", backend="attention_gym").forward,
        "cpu": str(explain(small._replace(tokens=64), device="cpu", backend="attention_gym")),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
