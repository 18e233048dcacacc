"""The key/value cache of transformer inference: every cache kind and its kernels, on CPU and CUDA, in Numba."""

from __future__ import annotations

from numkv._version import __version__
from numkv.append_plan import (
    AppendArgs,
    AppendDescriptor,
    AppendPlan,
    AppendSku,
    PrecisionGuarantee,
    append,
)
from numkv.attention import decode_attention, merge_states, prefill_attention
from numkv.cell_cache import (
    Batch,
    CacheConfig,
    CausalCache,
    ChunkedCache,
    SlidingWindowCache,
)
from numkv.compressor import CompressorConfig, HeadCompressor, MultiHeadCompressor
from numkv.encoder_cache import EncoderCache
from numkv.errors import (
    CacheFull,
    DimensionMismatch,
    NonFiniteInput,
    NotSupported,
    NumkvError,
    UnsupportedDType,
)
from numkv.eviction import AttentionTally
from numkv.kinds import Kind, kind
from numkv.kv_cache import KVCache
from numkv.layers import ContiguousLayer
from numkv.paged import PagedLayer, PagedPool
from numkv.paged_cache import PagedKVCache, PagedStats, Step, SwappedSequence
from numkv.paged_functions import (
    paged_append,
    paged_decode_attention,
    paged_prefill_attention,
    paged_write,
)
from numkv.projection import QKMode
from numkv.rope_shift import rope_shift
from numkv.warmup import warmup
from numkv.weights import attention_weights
from numkv.wrapper_cache import WrapperCache

__all__ = [
    "AppendArgs",
    "AppendDescriptor",
    "AppendPlan",
    "AppendSku",
    "AttentionTally",
    "Batch",
    "CacheConfig",
    "CacheFull",
    "CausalCache",
    "ChunkedCache",
    "CompressorConfig",
    "ContiguousLayer",
    "DimensionMismatch",
    "EncoderCache",
    "HeadCompressor",
    "KVCache",
    "Kind",
    "MultiHeadCompressor",
    "NonFiniteInput",
    "NotSupported",
    "NumkvError",
    "PagedKVCache",
    "PagedLayer",
    "PagedPool",
    "PagedStats",
    "PrecisionGuarantee",
    "QKMode",
    "SlidingWindowCache",
    "Step",
    "SwappedSequence",
    "UnsupportedDType",
    "WrapperCache",
    "__version__",
    "append",
    "attention_weights",
    "decode_attention",
    "kind",
    "merge_states",
    "paged_append",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_write",
    "prefill_attention",
    "rope_shift",
    "warmup",
]
