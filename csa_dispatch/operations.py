"""Every operation that is dispatched, and the class that describes its calls."""

from __future__ import annotations

from .call_spec import CallSpec
from .compressor_call import CompressorSpec
from .indexer_call import IndexerSpec

SPECS: dict[str, type[CallSpec] | type[CompressorSpec] | type[IndexerSpec]] = {
    "attention": CallSpec,
    "compress_kv": CompressorSpec,
    "lightning_indexer": IndexerSpec,
}
