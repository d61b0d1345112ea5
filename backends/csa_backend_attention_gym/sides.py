"""The fused side on CUDA: which of its kernels a call takes, and what they cannot do.

``gather_attn`` has three families of CUDA kernels. *cute* are FlashAttention-4's. *shared* are
Triton kernels for one KV head on Blackwell, whose loops are loops. *generic* are Triton kernels
for all else, whose forward is unrolled over slots and window tiles at compile time: of CPU time a
configuration, of which four are tried, 6 s at 16 slots of 128 columns, 17 s at 32; 13 s at 8 slots
of 512, 26 s at 16.
"""

from __future__ import annotations

from typing import NamedTuple

from csa_dispatch import CallSpec, Kind, Reason
from csa_dispatch.capabilities import Predicate

from .features import has_cute, triton_cat_takes_dim, triton_version

ELEMENTS_LIMIT = 2**31 - 1
"""Query elements that 32 bits address."""

CUTE, SHARED, GENERIC = "cute", "shared", "generic"
HEAD_DIMS = (64, 128, 512)


class Options(NamedTuple):
    """How the fused side runs.

    Attributes:
        side: "triton" or "cute" for one side's kernels; "auto" for CuTe where it can run the
            call, as ``gather_attn`` chooses.
        most_unrolled: most slots (half of it at head_dim 512), and most window tiles, that may be
            unrolled.
        recompute_p: False keeps the probabilities for the CuTe backward.
    """

    side: str = "auto"
    most_unrolled: int = 16
    recompute_p: bool = True


def cute_reasons(spec: CallSpec) -> list[Reason]:
    """Why the CuTe side cannot run a call."""
    checks = (
        ("capability", str(spec.capability), spec.capability in (100, 103), "100 or 103"),
        ("dtype", spec.dtype, spec.dtype == "bfloat16", "bfloat16"),
        ("kv_heads", str(spec.kv_heads), spec.kv_heads == 1, "1"),
        ("head_dim", str(spec.head_dim), spec.head_dim == 512, "512"),
        ("heads", str(spec.heads), spec.heads <= 128, "at most 128"),
        ("deterministic", "True", not spec.deterministic, "False"),
        ("slots", "0, and no window", bool(spec.window or pool_slots(spec)), "any key"),
        ("availability", "flash-attn-4 not installed", has_cute(), "flash-attn-4"),
    )
    return [
        Reason(field, actual, f"{needed} on its CuTe side", "use side='auto' or fa4")
        for field, actual, fits, needed in checks
        if not fits
    ]


def family(spec: CallSpec, options: Options) -> str:
    """Which kernels run a call."""
    if options.side == CUTE or (options.side == "auto" and not cute_reasons(spec)):
        return CUTE
    blackwell = spec.capability is not None and spec.capability >= 100
    wide = spec.head_dim <= 128 or spec.head_dim == 512
    shared = (
        blackwell
        and spec.dtype == "bfloat16"
        and spec.kv_heads == 1
        and 16 <= spec.heads <= 128
        and spec.head_dim % 16 == 0
        and wide
        and spec.window <= 2048
    )
    return SHARED if shared else GENERIC


def pool_slots(spec: CallSpec) -> int:
    """Slots of the pool; a dense one's are as many as its last token sees."""
    if spec.kind is not Kind.DENSE:
        return spec.slots
    packed = spec.documents == "cu_seqlens"
    return spec.pool if packed else min(spec.pool, spec.tokens // spec.compress_ratio)


def forward_predicates(options: Options) -> tuple[Predicate, ...]:
    """What a CUDA call must satisfy; each lets a CPU call pass."""

    def fused_sizes(spec: CallSpec) -> Reason | None:
        """On CUDA: head dims 64, 128 and 512; float32, bfloat16 or float16."""
        if spec.device_type != "cuda":
            return None
        if spec.head_dim not in HEAD_DIMS:
            needed = "64, 128 or 512 on CUDA"
            return Reason(
                "head_dim", str(spec.head_dim), needed, "Use triton up to 576, or eager."
            )
        if spec.dtype == "float64":
            needed = "float32, bfloat16 or float16 on CUDA"
            return Reason("dtype", spec.dtype, needed, "Use eager.")
        return None

    def fused_addresses(spec: CallSpec) -> Reason | None:
        """On CUDA: at most 2**31 - 1 elements of the query (B, H, T, D)."""
        elements = spec.batch * spec.heads * spec.tokens * spec.head_dim
        if spec.device_type != "cuda" or elements <= ELEMENTS_LIMIT:
            return None
        actual = f"{elements} elements of the query"
        return Reason("fused_addresses", actual, f"at most {ELEMENTS_LIMIT}", "Use triton.")

    def unrolled_slots(spec: CallSpec) -> Reason | None:
        """On CUDA its generic forward is unrolled: at most 16 slots, at head dim 512 at most 8."""
        if spec.device_type != "cuda" or family(spec, options) != GENERIC:
            return None
        slots, most = pool_slots(spec), options.most_unrolled
        most = most // 2 if spec.head_dim == 512 else most
        if slots <= most:
            return None
        actual = f"{slots} slots, which would be unrolled at compile time"
        needed = f"at most {most} outside Blackwell's bfloat16 kernels"
        return Reason("unrolled_slots", actual, needed, "Use triton or eager.")

    def unrolled_window(spec: CallSpec) -> Reason | None:
        """On CUDA its generic forward unrolls the window: at most 16 tiles of it."""
        if spec.device_type != "cuda" or family(spec, options) != GENERIC:
            return None
        rows, columns = (16, 16) if spec.head_dim == 512 else (64, 64)
        tiles = -(-(spec.window + rows - 1) // columns) if spec.window else 0
        if tiles <= options.most_unrolled:
            return None
        actual = f"{tiles} tiles of window, which would be unrolled at compile time"
        needed = f"at most {options.most_unrolled}"
        return Reason("unrolled_window", actual, needed, "Use triton or eager.")

    def cute_side(spec: CallSpec) -> Reason | None:
        """On CUDA with the option ``side="cute"``: what FlashAttention-4's kernels can run."""
        if spec.device_type != "cuda" or options.side != CUTE:
            return None
        return next(iter(cute_reasons(spec)), None)

    return fused_sizes, fused_addresses, unrolled_slots, unrolled_window, cute_side


def backward_predicates(options: Options) -> tuple[Predicate, ...]:
    """What a CUDA call's backward must satisfy besides, as it recomputes the forward."""

    def concatenates(spec: CallSpec) -> Reason | None:
        """On CUDA its backward of pools needs a Triton with ``tl.cat(dim=)``."""
        if spec.device_type != "cuda" or triton_cat_takes_dim():
            return None
        kernels = family(spec, options)
        if kernels == CUTE or (kernels == SHARED and not spec.deterministic):
            return None
        if not pool_slots(spec) or not spec.pool:
            return None
        needed = "tl.cat(dim=) for the gradient of sparse_kv"
        remedy = "Force triton or eager as backward_backend."
        return Reason("concatenates", triton_version(), needed, remedy)

    return (*forward_predicates(options), concatenates)
