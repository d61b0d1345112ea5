"""Sizes of a V4 attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import MAX_ROWS, fail
from ..wording import told
from .checks import check_int, check_positive


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretch of the rotary frequencies of compressed layers.

    Attributes:
        factor: how much longer than in pretraining the context is.
        original_max_position_embeddings: the context of pretraining.
        beta_fast, beta_slow: rotations within it from which a frequency is kept, and up to which
            it is divided by ``factor``.

    Raises:
        TypeError, ValueError: one is no positive number, or the context no int.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        check_int("original_max_position_embeddings", self.original_max_position_embeddings, 1)


_LEAST = {
    "hidden_size": 1,
    "num_attention_heads": 1,
    "head_dim": 1,
    "qk_rope_head_dim": 2,
    "q_lora_rank": 1,
    "o_groups": 1,
    "o_lora_rank": 1,
    "sliding_window": 1,
    "index_n_heads": 1,
    "index_head_dim": 1,
    "index_topk": 1,
}


@dataclass(frozen=True)
class CSAConfig:
    """One V4 attention layer; names are the Hugging Face config's where it has them.

    The defaults are V4-Flash's, of a window-only layer.

    Attributes:
        hidden_size: channels of the hidden states.
        num_attention_heads: query heads, of all tensor-parallel ranks together.
        head_dim: channels of a query head and of the one KV head.
        qk_rope_head_dim: trailing channels of a head that are rotated.
        q_lora_rank: channels of the low-rank query.
        o_groups, o_lora_rank: groups of heads, and channels each is projected to, before the
            output projection.
        sliding_window: tokens of the window, the token's own included.
        compress_ratio: tokens an entry; 0 or 1 for a window-only layer.
        indexer_ratios: the ratios whose layers select entries by an indexer. Their compressors
            overlap.
        dense: attend to every complete entry also where an indexer would select: there is none.
        index_n_heads, index_head_dim, index_topk: the indexer's heads, their channels, and the
            entries a token selects.
        rope_theta: rotary base of window-only layers.
        compress_rope_theta: rotary base of layers with a compressor.
        yarn: stretch of the frequencies of layers with a compressor, or None.
        rms_norm_eps: of every norm.

    Raises:
        TypeError, ValueError: a field is of another type or out of bounds.
    """

    hidden_size: int = 4096
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratio: int = 0
    indexer_ratios: tuple[int, ...] = (4,)
    dense: bool = False
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_int(name, getattr(self, name), least)
        check_int("compress_ratio", self.compress_ratio, 0, MAX_ROWS)
        if not isinstance(self.indexer_ratios, tuple):
            actual = told(self.indexer_ratios)
            fail("indexer_ratios", actual, "a tuple of ints", "Pass (4,) for V4's.", TypeError)
        for place, ratio in enumerate(self.indexer_ratios):
            check_int(f"indexer_ratios[{place}]", ratio, 1, MAX_ROWS)
        if not isinstance(self.dense, bool):
            fail("dense", told(self.dense), "a bool", "Pass True or False.", TypeError)
        for name in ("rope_theta", "compress_rope_theta", "rms_norm_eps"):
            check_positive(name, getattr(self, name))
        if self.yarn is not None and not isinstance(self.yarn, Yarn):
            fail("yarn", told(self.yarn), "a Yarn or None", "Pass Yarn(factor, ...).", TypeError)
        # YaRN divides by the base's logarithm.
        if self.yarn is not None and self.compress_rope_theta <= 1:
            theta = self.compress_rope_theta
            fail("compress_rope_theta", theta, "above 1 with yarn", "Or pass yarn=None.")
        if self.num_attention_heads % self.o_groups:
            required = f"a divisor of num_attention_heads, {self.num_attention_heads}"
            fail("o_groups", self.o_groups, required, "Change one of the two.")
        smallest = min(self.head_dim, self.index_head_dim if self.has_indexer else self.head_dim)
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > smallest:
            required = f"even and at most {smallest}, channels of the smallest head to be rotated"
            fail("qk_rope_head_dim", self.qk_rope_head_dim, required, "Rotate fewer channels.")

    @property
    def has_compressor(self) -> bool:
        return self.compress_ratio > 1

    @property
    def overlapping(self) -> bool:
        """Whether an entry also pools the block before its own."""
        return self.has_compressor and self.compress_ratio in self.indexer_ratios

    @property
    def has_indexer(self) -> bool:
        return self.overlapping and not self.dense

    @property
    def theta(self) -> float:
        """Rotary base of this layer: query, KV, entries and indexer alike."""
        return self.compress_rope_theta if self.has_compressor else self.rope_theta
