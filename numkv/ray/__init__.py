"""Paged caches past one machine: shards by kv heads, by context or both, as actors of Ray.

Importing this package does not import Ray; making `RayShards`, the default transport, does. `LocalShards` needs none.
"""

from __future__ import annotations

from numkv.ray.cache import ShardedKVCache, ShardedStats
from numkv.ray.messages import ShardDown, ShardLost
from numkv.ray.step import Attending, ShardedStep
from numkv.ray.transport import Delivery, Limits, LocalShards, RayShards, Transport

__all__ = [
    "Attending",
    "Delivery",
    "Limits",
    "LocalShards",
    "RayShards",
    "ShardDown",
    "ShardLost",
    "ShardedKVCache",
    "ShardedStats",
    "ShardedStep",
    "Transport",
]
