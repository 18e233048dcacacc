"""The key/value cache of transformer inference: every cache kind and its kernels, on CPU and CUDA, in Numba."""

from __future__ import annotations

import gc as _gc

# Imported objects stay alive, and with Numba there are so many that collecting garbage meanwhile, a hundred times in
# vain, takes a quarter of the time.
_collects = _gc.isenabled()
_gc.disable()
try:
    from numkv._version import __version__
    from numkv.attention import (
        AttentionOptions,
        attention_weights,
        cascade_attention,
        decode_attention,
        merge_states,
        paged_decode_attention,
        paged_prefill_attention,
        prefill_attention,
        tree_mask,
    )
    from numkv.caches import (
        Batch,
        BoundAttention,
        BoundLayer,
        BoundStep,
        CacheConfig,
        CausalCache,
        ContiguousLayer,
        EncoderCache,
        FullPrecision,
        KVCache,
        LayerSpec,
        PagedKVCache,
        PagedLayer,
        PagedPool,
        PagedStats,
        Profile,
        StateSlots,
        Step,
        StepBuffers,
        SwappedSequence,
        WrapperCache,
    )
    from numkv.compaction import AttentionTally
    from numkv.compaction.key_shift import rope_shift
    from numkv.compile_ahead import warmup
    from numkv.compression.compressor import HeadCompressor, MultiHeadCompressor
    from numkv.compression.config import CompressorConfig
    from numkv.compression.paged import PagedCompressor
    from numkv.drawing.text import show
    from numkv.errors import (
        CacheFull,
        DimensionMismatch,
        NonFiniteInput,
        NotSupported,
        NumkvError,
        UnsupportedDType,
    )
    from numkv.files import load, save
    from numkv.kinds import Kind, kind
    from numkv.targets import on_stream
    from numkv.threads import get_num_threads, num_threads, set_num_threads
    from numkv.writing.append_plan import (
        AppendArgs,
        AppendDescriptor,
        AppendPlan,
        AppendSku,
        PrecisionGuarantee,
        append,
    )
    from numkv.writing.fused_write import QKMode
    from numkv.writing.paged import paged_append, paged_write
finally:
    if _collects:
        _gc.enable()

__all__ = [
    "AppendArgs",
    "AppendDescriptor",
    "AppendPlan",
    "AppendSku",
    "AttentionOptions",
    "AttentionTally",
    "Batch",
    "BoundAttention",
    "BoundLayer",
    "BoundStep",
    "CacheConfig",
    "CacheFull",
    "CausalCache",
    "CompressorConfig",
    "ContiguousLayer",
    "DimensionMismatch",
    "EncoderCache",
    "FullPrecision",
    "HeadCompressor",
    "KVCache",
    "Kind",
    "LayerSpec",
    "MultiHeadCompressor",
    "NonFiniteInput",
    "NotSupported",
    "NumkvError",
    "PagedCompressor",
    "PagedKVCache",
    "PagedLayer",
    "PagedPool",
    "PagedStats",
    "PrecisionGuarantee",
    "Profile",
    "QKMode",
    "StateSlots",
    "Step",
    "StepBuffers",
    "SwappedSequence",
    "UnsupportedDType",
    "WrapperCache",
    "__version__",
    "append",
    "attention_weights",
    "cascade_attention",
    "decode_attention",
    "get_num_threads",
    "kind",
    "load",
    "merge_states",
    "num_threads",
    "on_stream",
    "paged_append",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_write",
    "prefill_attention",
    "rope_shift",
    "save",
    "set_num_threads",
    "show",
    "tree_mask",
    "warmup",
]
