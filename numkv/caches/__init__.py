"""The caches: objects that hold buffers and keep the books of sequences."""

from __future__ import annotations

from numkv.caches.bound import BoundAttention, BoundLayer, BoundStep
from numkv.caches.contiguous_layer import ContiguousLayer
from numkv.caches.kv_cache import KVCache
from numkv.caches.layer_spec import FullPrecision, LayerSpec, StateSlots
from numkv.caches.multi.arguments import Batch, CacheConfig
from numkv.caches.multi.causal import CausalCache
from numkv.caches.multi.encoder import EncoderCache
from numkv.caches.multi.wrapper import WrapperCache
from numkv.caches.paged.buffers import StepBuffers
from numkv.caches.paged.cache import PagedKVCache
from numkv.caches.paged.step import Step
from numkv.caches.paged.stored import PagedStats
from numkv.caches.paged.swap import SwappedSequence
from numkv.caches.paged_layer import PagedLayer
from numkv.caches.paged_pool import PagedPool
from numkv.caches.profile import Profile

__all__ = [
    "Batch",
    "BoundAttention",
    "BoundLayer",
    "BoundStep",
    "CacheConfig",
    "CausalCache",
    "ContiguousLayer",
    "EncoderCache",
    "FullPrecision",
    "KVCache",
    "LayerSpec",
    "PagedKVCache",
    "PagedLayer",
    "PagedPool",
    "PagedStats",
    "Profile",
    "StateSlots",
    "Step",
    "StepBuffers",
    "SwappedSequence",
    "WrapperCache",
]
