"""What surrounds ``attention()`` in a V4 layer, as functions."""

from .compressor import CompressedKV, compress_kv
from .compressor_step import CompressorState, compress_kv_step
from .indexer import lightning_indexer
from .indexer_loss import indexer_kl_loss
from .indexer_scores import indexer_scores
from .past import attention_with_past
from .window_lse import AttentionWithWindowLse, attention_with_window_lse

__all__ = [
    "AttentionWithWindowLse",
    "CompressedKV",
    "CompressorState",
    "attention_with_past",
    "attention_with_window_lse",
    "compress_kv",
    "compress_kv_step",
    "indexer_kl_loss",
    "indexer_scores",
    "lightning_indexer",
]
