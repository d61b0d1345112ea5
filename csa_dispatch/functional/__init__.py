"""What surrounds ``attention()`` in a V4 layer, as functions."""

from .compressor import CompressedKV, compress_kv
from .compressor_step import CompressorState, compress_kv_step

__all__ = ["CompressedKV", "CompressorState", "compress_kv", "compress_kv_step"]
