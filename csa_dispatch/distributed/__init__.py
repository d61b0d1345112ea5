"""attention() on DTensors, by PyTorch's own engine."""

from .sharding import register_sharding_rules

__all__ = ["register_sharding_rules"]
