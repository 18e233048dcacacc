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
from numkv.errors import (
    CacheFull,
    DimensionMismatch,
    NonFiniteInput,
    NotSupported,
    NumkvError,
    UnsupportedDType,
)
from numkv.kinds import Kind, kind
from numkv.kv_cache import KVCache
from numkv.layers import ContiguousLayer, QKMode

__all__ = [
    "AppendArgs",
    "AppendDescriptor",
    "AppendPlan",
    "AppendSku",
    "CacheFull",
    "ContiguousLayer",
    "DimensionMismatch",
    "KVCache",
    "Kind",
    "NonFiniteInput",
    "NotSupported",
    "NumkvError",
    "PrecisionGuarantee",
    "QKMode",
    "UnsupportedDType",
    "__version__",
    "append",
    "decode_attention",
    "kind",
    "merge_states",
    "prefill_attention",
]
