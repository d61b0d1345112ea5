"""attention() over several processes: sharding rules for DTensor, and context parallelism."""

from .context_parallel import context_parallel_attention
from .exchange import gather_shards, left_halo
from .sharding import register_sharding_rules

__all__ = [
    "context_parallel_attention",
    "gather_shards",
    "left_halo",
    "register_sharding_rules",
]
