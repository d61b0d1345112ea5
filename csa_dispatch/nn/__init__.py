"""DeepSeek-V4's attention layer as a module: compressor, indexer, RoPE, cache."""

from .attention import CompressedSparseAttention
from .cache import LayerCache
from .checkpoint import layer_tensors, load_layer
from .compressor import Compressor
from .config import CSAConfig, Yarn
from .deepseek_v4 import from_deepseek_v4
from .indexer import Indexer
from .record import IndexerRecord, LayerRecord

__all__ = [
    "CSAConfig",
    "CompressedSparseAttention",
    "Compressor",
    "Indexer",
    "IndexerRecord",
    "LayerCache",
    "LayerRecord",
    "Yarn",
    "from_deepseek_v4",
    "layer_tensors",
    "load_layer",
]
