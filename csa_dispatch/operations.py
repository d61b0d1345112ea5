"""Every operation that is dispatched, and the class that describes its calls."""

from __future__ import annotations

from .call_spec import CallSpec
from .indexer_call import IndexerSpec

SPECS: dict[str, type[CallSpec] | type[IndexerSpec]] = {
    "attention": CallSpec,
    "lightning_indexer": IndexerSpec,
}
