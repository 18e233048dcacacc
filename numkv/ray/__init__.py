"""Paged caches past one machine: shards by kv heads, by context or both, as actors of Ray.

Importing this package does not import Ray; making `RayShards`, the default transport, does. `LocalShards` needs none.
"""

from __future__ import annotations

from numkv.ray.actors import RayShards
from numkv.ray.cache import ShardedKVCache, ShardedStats
from numkv.ray.channel import Limits
from numkv.ray.errors import ShardDown, ShardLost
from numkv.ray.step import Attending, ShardedStep
from numkv.ray.transport import Delivery, LocalShards, Transport

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
